#!/bin/sh
# An agent of curl and jq, in the folder where it is started: the model answers with a block of sh, which is run, until it
# answers without one. It knows nothing of fsm_rollout. Its model is where OPENAI_BASE_URL says; the task comes as TASK.
set -eu
history=$(mktemp)
say() { jq -cn --arg role "$1" --arg text "$2" '{role: $role, content: $text}' >> "$history"; }
ask() {
    jq -cn --arg model "$OPENAI_MODEL" --slurpfile messages "$history" '{model: $model, messages: $messages}' |
        curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
            -H 'Content-Type: application/json' -d @- |
        jq -r '.choices[0].message.content'
}

say system 'You mend the repository in the present folder. Answer with one block of sh, between ```sh and ```: it is run,
and you see what it writes. Answer without one when you are done.'
say user "$TASK"
for turn in 1 2 3 4 5 6 7 8; do
    answer=$(ask)
    say assistant "$answer"
    block=$(printf '%s\n' "$answer" | sed -n '/^```sh$/,/^```$/{/^```/d;p;}')
    [ -n "$block" ] || break
    say user "$(timeout 60 sh -c "$block" 2>&1 < /dev/null | tail -c 4000)"
done
