"""What opens and what closes thinking is found out from the chat template; one without thinking is refused."""

from contextlib import suppress

import pytest

from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.thinking import REASONING
from fsm_rollout.errors import ChatTemplateError
from tests.unit.chat import chat_zoo as zoo
from tests.unit.chat.chat_zoo import CHATML, needs_zoo, tokenizer_for

ASK = "{{ '<|im_start|>assistant\\n' }}"
PREFILLED = CHATML.replace(ASK, "{{ '<|im_start|>assistant\\n<think>\\n' }}")
REFUSED = CHATML.replace(ASK, "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}")
CUTTING = CHATML.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")


def writing(before: str, after: str, template: str = CHATML) -> str:
    """A template that writes what a turn has thought between two texts."""
    thought = f"{{% if message.reasoning_content %}}{before}{{{{ message.reasoning_content }}}}{after}{{% endif %}}"
    return template.replace("{%- if message.content %}", thought + "{%- if message.content %}")


@pytest.mark.parametrize(
    ("template", "opening", "closing", "close", "begins"),
    [
        (writing("<think>\n", "\n</think>\n\n"), "<think>", "</think>", "\n</think>\n\n", ""),
        (writing("<think>", "</think>\n"), "<think>", "</think>", "</think>\n", ""),
        (writing("<think>\n", "\n</think>\n\n", PREFILLED), "<think>", "</think>", "\n</think>\n\n", "inside"),
        (writing("<think>\n", "\n</think>\n\n", REFUSED), "<think>", "</think>", "\n</think>\n\n", "behind"),
        (writing("<|channel>thought\n", "\n<channel|>"), "<|channel>thought", "<channel|>", "\n<channel|>", ""),
        (writing("Thoughts: ", " Answer: "), "Thoughts:", "Answer:", " Answer: ", ""),
        (PREFILLED + "{# </think> #}", "<think>", "</think>", "\n</think>\n\n", "inside"),
        (CUTTING, "<think>", "</think>", "\n</think>\n\n", ""),
    ],
)  # fmt: skip
def test_the_tags_are_those_of_the_template(template: str, opening: str, closing: str, close: str, begins: str) -> None:
    chat = ChatTemplate(tokenizer_for(template))
    found, prompt = chat.thinking, chat.prompt([zoo.user("<think>")], None)
    assert (found.opening, found.closing, chat.decode(found.close)) == (opening, closing, close)
    assert (found.opened_by(prompt), found.closed_by(prompt)) == (begins == "inside", begins == "behind")


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (CHATML, "writes no thinking"),
        (writing("<think>", ""), "writes no thinking"),
        (writing("<think>", "</think><|im_end|>"), "holds a token that ends the turn"),
    ],
)
def test_thinking_that_cannot_be_closed_is_refused(template: str, told: str) -> None:
    with pytest.raises(ChatTemplateError, match=rf"\[no-thinking\].*{told}"):
        _ = ChatTemplate(tokenizer_for(template)).thinking


@needs_zoo
@pytest.mark.parametrize("name", zoo.CASES)
def test_real_templates_close_as_they_write(name: str) -> None:
    """A turn that has thought, by the tags found, is what the template writes of one."""
    chat = ChatTemplate(zoo.tokenizer_of(name))
    with suppress(ChatTemplateError):
        found = chat.thinking
        said = {"role": "assistant", "content": "Four.", **dict.fromkeys(REASONING, "hm")}
        last = chat._renderer.render([zoo.user(), said], None, chat.now, generation=False)
        assert f"hm{chat.decode(found.close)}Four." in last or "hm" not in last
        prompt = chat.prompt([zoo.user()], None)
        assert found.opened_by(prompt) == chat.decode(prompt).rstrip().endswith(found.opening)
