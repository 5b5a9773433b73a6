"""Print how many template × scenario pairs are exact, and how many are refused by which rule.

``python -m tests.unit.chat.refusals``; first for the templates of ../shared/chat_templates, then for those of trl that
are not among them.
"""

from collections import Counter
from collections.abc import Sequence

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.errors import ChatTemplateError
from tests.unit.chat import chat_zoo as zoo


def report(names: Sequence[str]) -> None:
    counts: Counter[str] = Counter()
    templates: dict[str, set[str]] = {}
    for name in names:
        tokenizer = zoo.tokenizer_of(name)
        chat = ChatTemplate(tokenizer)
        for scenario in zoo.SCENARIOS.values():
            sampled = [7] if scenario.cut else [7, zoo.stop_of(name, tokenizer, scenario.tool_turn)]
            finish = "length" if scenario.cut else "stop"
            tools = zoo.TOOLS if scenario.tools else None
            try:
                chat.glue(scenario.history, scenario.new, tools, sampled_ids=sampled, finish_reason=finish)
                rule = "exact"
            except ChatTemplateError as refusal:
                rule = refusal.rule
            counts[rule] += 1
            templates.setdefault(rule, set()).add(name)
    print(f"{len(names)} templates x {len(zoo.SCENARIOS)} scenarios = {counts.total()} pairs")
    for rule, count in counts.most_common():
        print(f"{rule:18}{count:6}  in {len(templates[rule]):3} templates")


if __name__ == "__main__":
    report(sorted(zoo.SHARED))
    report([name for name in zoo.NAMES if name not in zoo.SHARED])
