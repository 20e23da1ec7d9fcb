"""Flags of vLLM 0.33 that are accepted without effect, because cpuserve needs no such setting."""

from __future__ import annotations

from cpuserve.config.no_op import NoOp

VLLM_NO_OPS = (
    NoOp(
        "--kernel-config --mamba-backend --mamba-ssu-algorithm --gdn-prefill-backend "
        "--kda-prefill-backend --kda-decode-backend --sparse-indexer-topk-backend "
        "--ir-op-priority --mm-encoder-attn-backend --all2all-backend",
        "kernels are chosen for the CPU automatically",
    ),
    NoOp(
        "--enable-flashinfer-autotune --no-enable-flashinfer-autotune --monokernel "
        "--no-monokernel --use-fp64-gumbel --no-use-fp64-gumbel",
        "kernels are chosen for the CPU automatically",
        "none",
    ),
    NoOp(
        "--mm-processor-cache-gb --mm-processor-cache-type "
        "--mm-shm-cache-max-object-size-mb --mm-hasher-algorithm",
        "pictures that were read are kept without an option, by the SHA-256 of their files",
    ),
    NoOp(
        "--mm-encoder-tp-mode",
        "all threads share a tower",
    ),
    NoOp(
        "--mm-encoder-attn-dtype",
        "towers compute in the type of their weights",
    ),
    NoOp(
        "--mm-tensor-ipc --mm-ipc-gpu-memory-gb",
        "pixels go to the engine with its messages",
    ),
    NoOp(
        "--mm-processor-device",
        "pictures are prepared on the CPU",
        only=("cpu", "auto"),
    ),
    NoOp(
        "--mm-device-do-normalize --no-mm-device-do-normalize",
        "pictures are prepared on the CPU",
        "none",
    ),
    NoOp(
        "--skip-mm-profiling --no-skip-mm-profiling",
        "the memory for pictures is planned, and not measured",
        "none",
    ),
    NoOp(
        "--interleave-mm-strings --no-interleave-mm-strings",
        "each picture is at the place of its part in the message",
        "none",
    ),
    NoOp(
        "--disable-chunked-mm-input --no-disable-chunked-mm-input "
        "--enable-mm-processor-stats --no-enable-mm-processor-stats",
        "tokens of pictures are chunked like others, and /metrics has their times",
        "none",
    ),
    NoOp(
        "--media-io-kwargs",
        "pictures are read as the files of the model say, and videos are not read",
    ),
    NoOp(
        "--video-pruning-rate --video-pruning-method",
        "videos are not read",
    ),
    NoOp(
        "--renderer-num-workers",
        "templates and pictures have processes of their own",
    ),
    NoOp(
        "--safetensors-load-strategy --safetensors-prefetch-num-threads "
        "--safetensors-prefetch-block-size --pt-load-map-location "
        "--model-loader-extra-config",
        "weights are loaded by the compute threads",
    ),
    NoOp(
        "--use-tqdm-on-load --no-use-tqdm-on-load",
        "the log shows the progress of a load",
        "none",
    ),
    NoOp(
        "--config-format",
        "the format is detected from the files",
    ),
    NoOp(
        "--distributed-timeout-seconds --cpu-distributed-timeout-seconds "
        "--dp-sync-interval --dcp-kv-cache-interleave-size "
        "--cp-kv-cache-interleave-size --dcp-comm-backend --master-port "
        "--elastic-ep-max-dp-size",
        "ranks are threads of one process here",
    ),
    NoOp(
        "--disable-nccl-for-dp-synchronization --no-disable-nccl-for-dp-synchronization "
        "--enable-nccl-comm-suspend --no-enable-nccl-comm-suspend "
        "--enable-shm-tensor-arena --no-enable-shm-tensor-arena "
        "--ray-workers-use-nsight --no-ray-workers-use-nsight "
        "--enable-batch-sharded-sampling --no-enable-batch-sharded-sampling "
        "--enable-ep-weight-filter --no-enable-ep-weight-filter --dcp-q-replicate "
        "--no-dcp-q-replicate --enable-hc-sp --no-enable-hc-sp",
        "ranks are threads of one process here",
        "none",
    ),
    NoOp(
        "--enable-dbo --no-enable-dbo --enable-layerwise-nvtx-tracing "
        "--no-enable-layerwise-nvtx-tracing --cudagraph-metrics --no-cudagraph-metrics "
        "--enable-mfu-metrics --no-enable-mfu-metrics --enable-cumem-allocator "
        "--no-enable-cumem-allocator --sleep-mode-offload-cudagraph "
        "--no-sleep-mode-offload-cudagraph",
        "there is no GPU",
        "none",
    ),
    NoOp(
        "--dbo-decode-token-threshold --dbo-prefill-token-threshold --sleep-mode-backend",
        "there is no GPU",
    ),
    NoOp(
        "--eplb-config --expert-placement-strategy",
        "experts are divided among ranks like all weights",
    ),
    NoOp(
        "--prefix-match-unit --prefix-cache-retention-interval",
        "prefixes are found in blocks, which leave the cache when others need their memory",
    ),
    NoOp(
        "--mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size "
        "--mamba-cache-mode --mamba-cache-philox-rounds --mamba-config "
        "--replayssm-buffer-len",
        "recurrent layers keep their states in fp32, without an option",
    ),
    NoOp(
        "--enable-mamba-shared-prefix-checkpoint "
        "--no-enable-mamba-shared-prefix-checkpoint --use-replayssm --no-use-replayssm "
        "--enable-mamba-cache-stochastic-rounding "
        "--no-enable-mamba-cache-stochastic-rounding",
        "recurrent layers keep their states in fp32, without an option",
        "none",
    ),
    NoOp(
        "--kv-sharing-fast-prefill --no-kv-sharing-fast-prefill --swa-bounded-replay "
        "--no-swa-bounded-replay --disable-hybrid-kv-cache-manager "
        "--no-disable-hybrid-kv-cache-manager",
        "layers share blocks of the KV cache in groups, without an option",
        "none",
    ),
    NoOp(
        "--offload-backend",
        "weights are in the memory of the CPU",
    ),
    NoOp(
        "--cpu-offload-params",
        "weights are in the memory of the CPU",
        "many",
    ),
    NoOp(
        "--max-num-active-seqs",
        "--max-num-seqs bounds the sequences of a step",
    ),
    NoOp(
        "--long-prefill-token-threshold-adaptive "
        "--no-long-prefill-token-threshold-adaptive --scheduler-reserve-full-isl "
        "--no-scheduler-reserve-full-isl",
        "prompts share the token budget of a step",
        "none",
    ),
    NoOp(
        "--prefill-schedule-interval --watermark",
        "prompts share the token budget of a step",
    ),
    NoOp(
        "--performance-mode",
        "steps are planned by measured costs",
    ),
    NoOp(
        "--specialize-active-lora --no-specialize-active-lora "
        "--enable-mixed-moe-lora-format --no-enable-mixed-moe-lora-format "
        "--enable-moe-shared-loras --no-enable-moe-shared-loras",
        "adapters are added to linears in one way",
        "none",
    ),
    NoOp(
        "--max-lora-cls-labels",
        "classifiers have no adapters",
    ),
    NoOp(
        "--kv-cache-metrics --no-kv-cache-metrics --enable-logging-iteration-details "
        "--no-enable-logging-iteration-details --aggregate-engine-logging "
        "--no-aggregate-engine-logging",
        "/metrics has the figures of the cache and of all engines",
        "none",
    ),
    NoOp(
        "--kv-cache-metrics-sample --show-hidden-metrics-for-version "
        "--per-request-spec-decode-metrics",
        "/metrics always has all figures",
    ),
    NoOp(
        "--jit-monitor-mode",
        "kernels are compiled ahead of time",
    ),
    NoOp(
        "--jit-monitor-verbose --no-jit-monitor-verbose",
        "kernels are compiled ahead of time",
        "none",
    ),
    NoOp(
        "--fail-on-environ-validation --no-fail-on-environ-validation",
        "unknown variables are named at the start",
        "none",
    ),
    NoOp(
        "--watchdog-config",
        "an engine that makes no progress is started again, without an option",
    ),
    NoOp(
        "--allow-deprecated-quantization --no-allow-deprecated-quantization",
        "no format is deprecated",
        "none",
    ),
    NoOp(
        "--cohere-format --anthropic-disabled-thinking-effort",
        "the chat template decides how thoughts are written",
    ),
    NoOp(
        "--cohere-is-reasoning-model --no-cohere-is-reasoning-model",
        "the chat template decides how thoughts are written",
        "none",
    ),
    NoOp(
        "--enable-tokenizer-info-endpoint --no-enable-tokenizer-info-endpoint "
        "--enable-server-load-tracking --no-enable-server-load-tracking "
        "--enable-per-request-metrics --no-enable-per-request-metrics",
        "these endpoints and figures are always there",
        "none",
    ),
    NoOp(
        "--enable-offline-docs --no-enable-offline-docs --log-error-stack "
        "--no-log-error-stack --enable-log-outputs --no-enable-log-outputs "
        "--enable-log-deltas --no-enable-log-deltas",
        "no text of requests is logged, and there are no documentation pages",
        "none",
    ),
    NoOp(
        "--h11-max-incomplete-event-size --h11-max-header-count",
        "headers have fixed limits",
    ),
    NoOp(
        "--trust-request-mm-kwargs --no-trust-request-mm-kwargs "
        "--enable-flash-late-interaction --no-enable-flash-late-interaction",
        "settings of requests are checked, and vectors are compared without an option",
        "none",
    ),
    NoOp(
        "--fingerprint-mode --fingerprint-value",
        "system_fingerprint is the digest of the build",
    ),
    NoOp(
        "--sse-keep-alive-interval",
        "--sse-ping-interval sets how often a silent stream gets a ping",
    ),
)
