{{- define "cpuserve.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "cpuserve.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "cpuserve.labels" -}}
{{ include "cpuserve.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "cpuserve.claim" -}}
{{- .Values.persistence.existingClaim | default (include "cpuserve.name" .) -}}
{{- end -}}

{{- /* Whether only one node, or one pod, may mount the volume that the chart makes. */ -}}
{{- define "cpuserve.exclusive" -}}
{{- if and .Values.persistence.enabled (not .Values.persistence.existingClaim) (ne .Values.persistence.accessMode "ReadWriteMany") -}}
yes
{{- end -}}
{{- end -}}

{{- /* The most replicas that run at the same time. */ -}}
{{- define "cpuserve.most" -}}
{{- if .Values.autoscaling.enabled -}}
{{ int .Values.autoscaling.maxReplicas }}
{{- else -}}
{{ int .Values.replicas }}
{{- end -}}
{{- end -}}

{{- /* The least replicas that run at the same time. */ -}}
{{- define "cpuserve.least" -}}
{{- if .Values.autoscaling.enabled -}}
{{ int .Values.autoscaling.minReplicas }}
{{- else -}}
{{ int .Values.replicas }}
{{- end -}}
{{- end -}}

{{- /* The arguments of `cpuserve serve`: the model, then options in the order of their names. */ -}}
{{- define "cpuserve.args" -}}
- {{ .Values.model | quote }}
- "--drain-delay={{ int .Values.drain.delaySeconds }}"
- "--drain-timeout={{ int .Values.drain.timeoutSeconds }}"
{{- if .Values.kvEvents.enabled }}
- {{ printf "--kv-events-config=%s" (include "cpuserve.kvEvents" .) | quote }}
{{- end }}
{{- if .Values.apiKeyFileSecret }}
- "--api-key-file=/run/secrets/callers/api-keys"
{{- end }}
{{- with .Values.ingress.proxies }}
- {{ printf "--forwarded-allow-ips=%s" (join "," .) | quote }}
{{- end }}
{{- if .Values.tlsSecret }}
- "--ssl-certfile=/run/secrets/tls/tls.crt"
- "--ssl-keyfile=/run/secrets/tls/tls.key"
{{- end }}
{{- range $name, $value := .Values.options }}
{{- if kindIs "bool" $value }}
- "--{{ if not $value }}no-{{ end }}{{ $name }}"
{{- else if kindIs "float64" $value }}
- "--{{ $name }}={{ if eq $value (floor $value) }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}"
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* llm-d expects the address of the endpoint and the model in the topic. */ -}}
{{- define "cpuserve.kvEvents" -}}
{"enable_kv_cache_events": true, "endpoint": "tcp://*:{{ int .Values.kvEvents.port }}", "replay_endpoint": "tcp://*:{{ int .Values.kvEvents.replayPort }}", "topic": "kv@$(POD_IP):8000@{{ .Values.model }}"}
{{- end -}}
