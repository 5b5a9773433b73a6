"""Pictures in what trainers are given: as each takes them, and never ids alone."""

import base64
from collections.abc import Callable
from typing import Any

import pytest
import torch
from renderers.base import MultiModalData, PlaceholderRange

from fsm_rollout.adapters import areal, openenv, prime_rl, skyrl, slime, tinker, trl
from fsm_rollout.errors import BatchError
from tests.unit.batch.test_media import batch, processor
from tests.vision import FAMILIES

FORMS: dict[str, tuple[Callable[[Any], object], str]] = {
    "AReaL": (areal.trajectory, "shows 3 pictures, and nothing carries them to AReaL yet"),
    "OpenEnv": (openenv.training_trace, "shows 3 pictures, and nothing carries them to OpenEnv yet"),
    "SkyRL": (skyrl.generator_output, "shows 3 pictures, and nothing carries them to SkyRL yet"),
    "tinker": (tinker.trajectories, "shows 3 pictures, and nothing carries them to tinker yet"),
    "TRL": (trl.rollout_func_result, "shows pictures after its prompt, and GRPOTrainer's rollout_func has no way"),
    "prime-rl": (prime_rl.training_samples, "prime-rl would train on their ids without them; give the model's proc"),
    "slime": (slime.samples, "slime would train on their ids without them; give the model's processor"),
}


@pytest.mark.parametrize("trainer", FORMS)
def test_no_trainer_is_given_the_ids_of_pictures_without_them(trainer: str) -> None:
    form, why = FORMS[trainer]
    with pytest.raises(BatchError, match=f"row 0/0/0 .*{why}"):
        form(batch("gemma3").rows())


def fed(family: str) -> list[dict[str, torch.Tensor]]:
    """Return what the batch itself feeds a model of each row's pictures, types of tokens apart."""
    rows = batch(family).tensordict.get("multi_modal_inputs").tolist()
    return [{key: value for key, value in row.items() if not key.endswith("token_type_ids")} for row in rows]


@pytest.mark.parametrize("family", FAMILIES)
def test_slimes_samples_carry_what_the_model_is_fed(family: str) -> None:
    rows = batch(family).rows()
    for row, sample, inputs in zip(rows, slime.samples(rows, processor(family)), fed(family), strict=True):
        images: Any = sample["multimodal_inputs"] or {"images": []}
        shown = [span.picture.image().tobytes() for span in row.media]
        assert [image.tobytes() for image in images["images"]] == shown
        made: Any = sample["multimodal_train_inputs"] or {}
        assert made.keys() == inputs.keys()
        assert all(torch.equal(made[key], inputs[key]) for key in inputs)
        assert (sample["multimodal_train_inputs"] is None) == (not row.media)


@pytest.mark.parametrize("family", FAMILIES)
def test_prime_rls_samples_say_where_pictures_stand_and_what_they_are(family: str) -> None:
    """Each place is the picture's own ids and nothing else; hashes and inputs are in the types of ``renderers``."""
    rows, eye = batch(family).rows(), processor(family)
    for row, fields, inputs in zip(rows, prime_rl.training_samples(rows, processor=eye), fed(family), strict=True):
        data = prime_rl.multi_modal_data(row, eye)
        assert isinstance(data, MultiModalData)
        if not row.media:
            assert data.is_empty()
            assert not {"mm_refs", "mm_token_type_ids"} & fields.keys()
            continue
        ids: Any = fields["token_ids"]
        ((refs,), types) = fields["mm_refs"], fields["mm_token_type_ids"]  # type: ignore[misc]
        assert types == [int(id_ == eye.image_token_id) for id_ in ids]
        for span, (uri, start, length), place in zip(row.media, refs, data.mm_placeholders["image"], strict=True):
            assert base64.b64decode(uri.partition(",")[2]) == span.picture.data
            assert place == PlaceholderRange(start, length)
            assert span.start <= start < start + length <= span.end
            assert set(ids[start : start + length]) == {eye.image_token_id}
            assert eye.image_token_id not in ids[span.start : start] + ids[start + length : span.end]
        assert data.mm_hashes == {"image": [span.picture.sha256 for span in row.media]}
        for key, value in inputs.items():
            apart = [item[key] for item in data.mm_items["image"]]
            assert sum(map(len, apart)) == len(value)
            if key != "pixel_values" or family != "llava_next":  # whose pictures of several sizes are padded
                assert torch.equal(torch.cat(apart), value)


def test_a_picture_in_several_parts_is_none_for_prime_rl() -> None:
    from dataclasses import replace

    row = batch("gemma3").rows()[0]
    span = row.media[0]
    (_, start, length) = prime_rl.training_samples([row], processor=processor("gemma3"))[0]["mm_refs"][0][0]  # type: ignore[index]
    cut = row.prompt_ids.copy()
    cut[start + length // 2] = 5
    with pytest.raises(BatchError, match="shows a picture in several parts"):
        prime_rl.training_samples([replace(row, prompt_ids=cut, media=[span])], processor=processor("gemma3"))
