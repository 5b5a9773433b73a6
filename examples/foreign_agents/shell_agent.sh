#!/bin/sh
# An agent of curl and jq: it asks, tells the model to check its answer, and asks again. It knows nothing of fsm_rollout.
# Its model is where OPENAI_BASE_URL says; the task comes as TASK.
set -e
ask() {
    jq -n --arg model "$OPENAI_MODEL" --slurpfile messages history '{model: $model, messages: $messages, max_tokens: 64}' |
        curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
            -H 'Content-Type: application/json' -d @- |
        jq -c '.choices[0].message' >> history
}
say() { jq -cn --arg text "$1" '{role: "user", content: $text}' >> history; }

say "$TASK"
ask
say "Please check that."
ask
