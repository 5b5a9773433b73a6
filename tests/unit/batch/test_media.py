"""Pictures in batches: the model is fed what the processor makes of all of them, and positions are its own."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.events import ContextOpened, Generated, PromptExtended
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import MediaSpan, as_ids, as_logprobs
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import prompted
from tests.unit.chat.test_pictures import PLACEHOLDERS
from tests.vision import FAMILIES, MODELS, random_model

PAD = 0


@cache
def processor(family: str) -> Any:
    return FAMILIES[family]()


def picture(seed: int, height: int, width: int) -> StoredPicture:
    return picture_of(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def trajectory(
    family: str, number: int, before: Sequence[StoredPicture], after: Sequence[StoredPicture], *, answered: bool = True
) -> Trajectory:
    """Return a trajectory that shows pictures in its prompt and, after a turn, more of them; then it may go on."""
    eye = processor(family)
    placeholder = eye.tokenizer.convert_tokens_to_ids(PLACEHOLDERS[family])

    def shown(pictures: Sequence[StoredPicture]) -> tuple[Any, list[MediaSpan]]:
        ids, media = as_ids([5]), []
        for each in pictures:
            own = eye(text=[PLACEHOLDERS[family]], images=[each.image()], add_special_tokens=False)["input_ids"][0]
            media.append(MediaSpan(len(ids), len(own), each, placeholder))
            ids += as_ids([*own, 6])
        return ids, media

    def said(at: float) -> Generated:
        return Generated(
            at=at, context="main", state="GENERATING", ids=as_ids([7, 8]), logprobs=as_logprobs([-1, -1]),
            versions=[(2, 0)], finish_reason="stop", message={"role": "assistant", "content": "x"},
        )  # fmt: skip

    ids, media = shown(before)
    more, more_media = shown(after)
    return Trajectory.fold(
        [
            prompted(f"{number}/0"),
            ContextOpened(
                at=0.0, context="main", state="PENDING", messages=[], ids=ids, trained=True, engine="policy",
                media=media,
            ),
            said(1.0),
            PromptExtended(at=2.0, context="main", state="PENDING", ids=more, media=more_media),
            *([said(3.0)] if answered else []),
        ]
    )  # fmt: skip


def batch(family: str, **options: Any) -> TrajectoryBatch:
    a, b, c = picture(1, 30, 60), picture(2, 57, 28), picture(3, 28, 28)
    made = [trajectory(family, 0, [a], [b, a]), trajectory(family, 1, [], []), trajectory(family, 2, [], [c])]
    return TrajectoryBatch.from_trajectories(made, pad_id=PAD, processor=processor(family), **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_fed_what_the_processor_makes_of_all_pictures(family: str) -> None:
    """The oracle is one call of the processor for each row, with all of its pictures."""
    whole, eye = batch(family), processor(family)
    inputs = whole.tensordict.get("multi_modal_inputs").tolist()
    for row, made in enumerate(inputs):
        media = whole.media(row)
        images = [span.picture for span in media]
        assert whole.tensordict.get("multi_modal_data").tolist()[row] == {"images": images}
        if not media:
            assert made == {}
            continue
        texts = PLACEHOLDERS[family] * len(media)
        expected = eye(text=[texts], images=[each.image() for each in images], return_tensors="pt")
        for key, value in expected.items():
            if key not in ("input_ids", "attention_mask") and not key.endswith("token_type_ids"):
                assert torch.equal(made[key], value), key
        for key in [key for key in made if key.endswith("token_type_ids")]:
            inside = torch.cat([made[key][span.start : span.end] for span in media])
            assert int(made[key].sum()) == int(inside.sum()) > 0
    # The same for a padded batch in one go: a type stands where its token stands.
    together = whole.model_inputs()
    assert len(together["pixel_values"]) == sum(len(made["pixel_values"]) for made in inputs if made)
    ids, prompts = whole.tensordict["input_ids"], whole.tensordict["prompts"].shape[1]
    for key in [key for key in together if key.endswith("token_type_ids")]:
        assert together[key].shape == ids.shape
        assert int(together[key].sum()) == sum(int(made[key].sum()) for made in inputs if made)
        typed = {int(id_) for id_ in ids[together[key] == 1]}
        assert typed <= {getattr(eye, "image_token_id", None)}, (typed, prompts)


def test_pictures_are_stored_once_and_made_again(tmp_path: Path) -> None:
    whole = batch("gemma3")
    whole.save(tmp_path / "batch")
    files = list((tmp_path / "batch" / "pictures").iterdir())
    assert sorted(file.name for file in files) == sorted(
        picture(*each).sha256 for each in ((1, 30, 60), (2, 57, 28), (3, 28, 28))
    )
    for loaded in (
        TrajectoryBatch.load(tmp_path / "batch", processor("gemma3")),
        TrajectoryBatch.load(tmp_path / "batch"),
    ):
        assert [loaded.media(row) for row in range(3)] == [whole.media(row) for row in range(3)]
        assert ("multi_modal_inputs" in loaded.tensordict) == (loaded.processor is not None)
        assert loaded.rows() == whole.rows()


def test_rows_packed_and_selected_keep_their_pictures() -> None:
    whole, packed = batch("llava_next"), batch("llava_next", packed=True)
    assert packed.rows() == whole.rows()
    assert [span.picture for span in packed.media(0)] == [span.picture for span in whole.media(0)]
    for some in (whole.select([2, 0]), packed.select([2, 0])):
        assert [some.media(0), some.media(1)] == [whole.media(2), whole.media(0)]
    for some in (whole.select([1]), packed.select([1]), whole.select([]), packed.select([])):  # they show none
        assert {"media", "multi_modal_data", "multi_modal_inputs"}.isdisjoint(some.tensordict.keys())
        assert some.tree().places.size(0) == len(some)
    with pytest.raises(BatchError, match="is packed"):
        packed.model_inputs()


def test_a_row_with_pictures_is_never_cut() -> None:
    cut = batch("gemma3", response_width=3, overflow="truncate")
    assert [str(row_id) for row_id in cut.omitted] == ["0/0/0", "2/0/0"]
    assert [str(row_id) for row_id in cut.truncated] == ["1/0/0"]


@pytest.mark.parametrize("family", MODELS)
def test_a_row_in_a_padded_batch_is_what_it_is_alone(family: str) -> None:
    """Pixels, grids, types of tokens and positions of rows of other lengths do not get into one another's way."""
    model, whole = random_model(family, processor(family)), batch(family)

    def logprobs(of: TrajectoryBatch) -> list[torch.Tensor]:
        ids, width = of.tensordict["input_ids"], of.tensordict["prompts"].shape[1]
        with torch.no_grad():
            logits = model(
                input_ids=ids, attention_mask=of.tensordict["attention_mask"], use_cache=False, **of.model_inputs()
            ).logits[:, width - 1 : -1]  # fmt: skip
        made = torch.log_softmax(logits.float(), -1).gather(-1, of.tensordict["responses"][..., None])[..., 0]
        return [row[mask.bool()] for row, mask in zip(made, of.tensordict["response_mask"], strict=True)]

    together = logprobs(whole)
    for row in range(len(whole)):
        (alone,) = logprobs(whole.select([row]))
        assert together[row] == pytest.approx(alone, abs=1e-4)


def test_a_batch_that_nobody_can_make_inputs_of_is_none_for_a_model() -> None:
    blind = TrajectoryBatch.from_rows(batch("gemma3").rows(), pad_id=PAD)
    with pytest.raises(BatchError, match="has no `processor`"):
        blind.model_inputs()


def test_text_has_no_columns_for_pictures() -> None:
    text = TrajectoryBatch.from_trajectories(
        [trajectory("gemma3", 1, [], [])], pad_id=PAD, processor=processor("gemma3")
    )
    assert {"media", "multi_modal_data", "multi_modal_inputs", "mrope_position_ids"}.isdisjoint(text.tensordict.keys())
    assert text.model_inputs() == {}
