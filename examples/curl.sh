#!/usr/bin/env bash
# Requests to a running server. usage: curl.sh [URL]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
json='Content-Type: application/json'

curl -sf "$url/v1/models"
echo
curl -sf "$url/v1/chat/completions" -H "$json" \
  -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}'
echo
curl -sf "$url/v1/completions" -H "$json" -d '{"prompt": "The capital of France is", "max_tokens": 8}'
echo
curl -sf "$url/tokenize" -H "$json" -d '{"prompt": "The capital of France is"}'
echo
curl -sf "$url/metrics" | grep '^vllm:generation_tokens_total'
