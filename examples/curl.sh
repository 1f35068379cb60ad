#!/bin/sh
# Talk to a running server with nothing but curl: sh examples/curl.sh [BASE_URL]
set -eu
base="${1:-${OPENAI_BASE_URL:-http://127.0.0.1:8000/v1}}"
key="Authorization: Bearer ${OPENAI_API_KEY:-none}"
json="Content-Type: application/json"

# Which models are served
curl -sSf "$base/models" -H "$key"
echo

# A question
curl -sSf "$base/chat/completions" -H "$key" -H "$json" -d '{
  "model": "quire-demo",
  "temperature": 0,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]
}'
echo

# The same, streamed
curl -sSfN "$base/chat/completions" -H "$key" -H "$json" -d '{
  "model": "quire-demo",
  "temperature": 0,
  "stream": true,
  "stream_options": {"include_usage": true},
  "messages": [{"role": "user", "content": "What is the capital of France?"}]
}'

# A text to go on with
curl -sSf "$base/completions" -H "$key" -H "$json" -d '{
  "model": "quire-demo",
  "prompt": "The opposite of hot is",
  "max_tokens": 8,
  "temperature": 0
}'
echo
