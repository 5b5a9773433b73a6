"""Endless prompts: every epoch has each once, the seed decides the order, and there is an end."""

from itertools import islice

import pytest

from fsm_rollout import endless_prompts


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own() -> None:
    drawn = list(endless_prompts(range(50), seed=1, epochs=3))
    epochs = [drawn[i : i + 50] for i in (0, 50, 100)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert epochs[0] != epochs[1] != list(range(50))
    assert drawn == list(endless_prompts(range(50), seed=1, epochs=3))
    assert drawn != list(endless_prompts(range(50), seed=2, epochs=3))


def test_the_bound_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    prompts = endless_prompts(["a"], epochs=4)
    assert list(islice(prompts, 3)) == ["a"] * 3
    assert not caplog.records
    assert list(prompts) == ["a"]
    assert "all 1 prompts were used 4 times; give more epochs" in caplog.text


@pytest.mark.parametrize(("prompts", "epochs"), [([], 1), (["a"], 0)])
def test_nothing_to_repeat_is_an_error(prompts: list[str], epochs: int) -> None:
    with pytest.raises(ValueError, match=r"no prompt to repeat|epochs must be at least 1"):
        endless_prompts(prompts, epochs=epochs)
