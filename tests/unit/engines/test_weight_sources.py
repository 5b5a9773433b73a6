"""Tensors on their way: whole in every engine, read once, two buckets at most; what fails leaves nothing half done."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.broadcast import FOUND_WITHIN, Broadcast, BroadcastGroup, Seat, _Interrupted
from fsm_rollout.engines.digests import _sums, digest
from fsm_rollout.engines.present_weights import PresentWeights
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost
from fsm_rollout.engines.updating import ServerAddress
from fsm_rollout.engines.weight_sources import Bucket, Tensors, WeightsGone, as_source
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import run_virtual

KINDS = [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.float8_e5m2, torch.bool]


class Taker:
    """Loads buckets as slowly as it is told, and fails where it is told: at a bucket, with an error."""

    def __init__(self, slow: int = 0, fails: Mapping[int, Exception] | None = None) -> None:
        self.slow, self.fails = slow, dict(fails or {})
        self.tensors: dict[str, torch.Tensor] = {}
        self.buckets, self.versions = 0, list[int | None]()

    async def begin_update(self, known: Mapping[str, torch.Tensor], *, local: bool) -> None:
        self.tensors.clear()

    async def load_bucket(self, bucket: Bucket) -> None:
        self.buckets += 1
        for _ in range(self.slow):
            await asyncio.sleep(0.001)
        if (error := self.fails.pop(self.buckets, None)) is not None:
            raise error
        self.tensors |= {name: tensor.clone() for name, tensor in bucket.tensors.items()}

    async def end_update(self, version: int | None) -> None:
        self.versions.append(version)
        if version is None and self.tensors:
            raise HalfLoaded("it has a part")


class Whole(Taker):
    """Loads all at once."""

    begin_update = None

    async def update_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.tensors |= {name: tensor.clone() for name, tensor in weights.items()}
        await self.end_update(version)

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


def deliver(source: Tensors, *takers: Any) -> list[Exception | None]:
    return asyncio.run(source.deliver(takers, 7, 60.0))


def drawn(kind: torch.dtype, shape: list[int], step: int, turned: bool, seed: int) -> torch.Tensor:
    values = torch.randint(0, 2 if kind is torch.bool else 9, shape, generator=torch.Generator().manual_seed(seed))
    values = values.to(kind)[..., ::step] if shape else values.to(kind)
    return values.t() if turned and len(shape) == 2 else values


TENSOR = st.builds(
    drawn, st.sampled_from(KINDS), st.lists(st.integers(0, 6), max_size=3), st.integers(1, 2), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip


@given(
    tensors=st.dictionaries(st.text(min_size=1, max_size=3), TENSOR, max_size=9),
    size=st.integers(1, 400),
    slow=st.lists(st.integers(0, 2), min_size=1, max_size=4),
    form=st.sampled_from(["mapping", "function", "pairs"]),
    kind=st.sampled_from([Taker, Whole]),
)
def test_every_engine_has_what_was_read_once_with_two_buckets_in_memory(
    tensors: dict[str, torch.Tensor], size: int, slow: list[int], form: str, kind: type[Taker]
) -> None:
    read: Counter[str] = Counter()
    held: WeakSet[Any] = WeakSet()

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            read[name] += 1
            yield name, tensor

    class Counted(Tensors):
        def _memory(self, size: int, like: torch.Tensor) -> torch.Tensor:
            memory = super()._memory(size, like)
            held.add(memory)
            assert len(held) <= 2
            assert size <= max(self._bucket_bytes, *(tensor.nbytes for tensor in tensors.values()))
            return memory

    forms: dict[str, Any] = {"mapping": tensors, "function": pairs, "pairs": pairs()}
    source = Counted(forms[form], bucket_bytes=size)
    takers = [kind(steps) for steps in slow]
    assert deliver(source, *takers) == [None] * len(takers)
    assert source.names == tensors.keys()
    for taker in takers:
        assert taker.versions == [7]
        assert taker.tensors.keys() == tensors.keys()
        assert all(torch.equal(taker.tensors[name], tensor) for name, tensor in tensors.items())
        assert all(taker.tensors[name].dtype is tensor.dtype for name, tensor in tensors.items())
    assert set(read.values()) <= {1}


def ones(count: int, bad: int | None = None) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((4,), float("nan") if at == bad else float(at)) for at in range(count)}


@pytest.mark.parametrize(("bad", "kind"), [(0, EngineError), (3, HalfLoaded)])
def test_a_nan_that_comes_late_leaves_engines_that_know_it(bad: int, kind: type[Exception]) -> None:
    taker = Taker()
    (error,) = deliver(Tensors(lambda: ones(5, bad), bucket_bytes=16), taker)
    assert type(error) is kind
    assert f"new weight 'w{bad}' is not finite" in str(error)
    assert set(taker.versions) == {None}


@pytest.mark.parametrize("fails", [{1: ReplicaLost("gone")}, {2: HalfLoaded("no memory")}, {}])
def test_a_generator_is_read_to_its_end_whatever_fails(fails: dict[int, Exception]) -> None:
    """Every rank of FSDP takes part in gathering a tensor: those that nobody asked for any more would wait for ever."""
    read: list[str] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in ones(9, None if fails else 2).items():
            read.append(name)
            yield name, tensor

    source = Tensors(pairs(), bucket_bytes=16)
    taker = Taker(fails=fails)
    (error,) = deliver(source, taker)
    assert isinstance(error, ReplicaLost)
    assert read == list(ones(9))
    assert not source.again
    assert taker.buckets <= 2, "and is not tried a second time"


@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(2, 40),
    at=st.tuples(st.integers(0, 99), st.integers(0, 99)),
    change=st.sampled_from(["swap", "signs", "bit"]),
)
@pytest.mark.parametrize("of", [digest, _sums])
def test_whatever_changes_in_a_tensor_changes_its_digest(
    of: Callable[[torch.Tensor], bytes], kind: torch.dtype, size: int, at: tuple[int, int], change: str
) -> None:
    """A sum of its bits is the same when two numbers change places, or one gains what another loses."""
    values = torch.arange(size * kind.itemsize, dtype=torch.uint8)
    before, (first, second) = values.clone(), (place % len(values) for place in at)
    if change == "swap":
        values[[first, second]] = values[[second, first]]
    elif change == "bit":
        values[first] ^= 1 << second % 8
    else:
        values[[first, second]] ^= 128
    same = torch.equal(values, before)
    assert (of(values.view(kind)) == of(before.view(kind))) is same


def test_one_that_fails_does_not_stop_the_others_and_one_with_a_part_is_asked_again() -> None:
    takers = Taker(), Taker(fails={2: ReplicaLost("gone")}), Taker(fails={3: HalfLoaded("others left")})
    whole, lost, again = deliver(Tensors(ones(5), bucket_bytes=16), *takers)
    assert (whole, str(lost), again) == (None, "gone", None)
    assert [taker.versions for taker in takers] == [[7], [], [7]]
    assert [taker.buckets for taker in takers] == [5, 2, 3 + 5]
    assert takers[2].tensors.keys() == ones(5).keys()


def test_asked_again_they_are_the_same_or_gone() -> None:
    tensors = ones(5)
    for source in Tensors(tensors), Tensors(tensors.items), Tensors(tensors, bucket_bytes=16):
        tensors["w4"][:] = 4.0
        assert deliver(source, Taker()) == deliver(source, Taker()) == [None]
        tensors["w4"][2] = 4.5
        with pytest.raises(WeightsGone, match="'w4' has changed since, as in training"):
            deliver(source, Taker())
    left = ones(2)
    for source, kind in itertools.product((Tensors(left), Tensors(left.items)), (Taker, Whole)):
        left |= ones(2)
        weights = PresentWeights().with_update(source, 7)
        asyncio.run(weights.fill(kind(), 60.0))
        del left["w1"]
        with pytest.raises(WeightsGone, match="'w1' is not among them any more"):
            asyncio.run(weights.fill(kind(), 60.0))
    pairs = Tensors(iter(ones(2).items()))
    deliver(pairs, Taker())
    with pytest.raises(WeightsGone, match="give a mapping, or a function"):
        deliver(pairs, Taker())


class Gathered(BroadcastGroup):
    """Of servers in this process: a bucket is there when all have asked for it; ``broken``: rank 0 sends none."""

    broken = False

    async def form(self, engines: Sequence[Any], device: str, seconds: float) -> list[Exception | None]:
        self.loop, self.size, self.met = asyncio.get_running_loop(), len(engines), 0
        self.ended, self.failed = asyncio.Event(), False
        return [None] * len(engines)

    async def meet(self) -> None:
        self.met += 1
        if self.met == self.size:
            self.ended.set()
        await self.ended.wait()
        if self.failed:
            raise HalfLoaded("others have left")

    def _broadcast(self, flat: torch.Tensor) -> None:
        if not self.broken:
            asyncio.run_coroutine_threadsafe(self.ended.wait(), self.loop).result()
        if self.failed or self.broken:
            raise RuntimeError("Connection closed by peer\nframe #0")

    def close(self) -> None:
        self.failed = True
        self.ended.set()


class Server(Taker):
    """Takes part; fails with each bucket from the one on that it is told."""

    address = ServerAddress("http://127.0.0.1:1", None, 1)

    def __init__(self, group: Gathered, fails: tuple[int, Exception] | None = None) -> None:
        super().__init__()
        self.group, self.fault = group, fails

    async def join_group(self, seat: Seat) -> None: ...

    async def leave_group(self, group: str) -> None: ...

    async def receive_bucket(self, bucket: Bucket, group: str) -> None:
        if self.fault is not None and self.buckets + 1 >= self.fault[0]:
            if type(self.fault[1]) is ReplicaLost:  # its neighbours notice before its owner does
                self.group.close()
                await asyncio.sleep(0.001)
            raise self.fault[1]
        await self.group.meet()
        await self.load_bucket(bucket)


FAULT = st.tuples(st.integers(1, 6), st.sampled_from([HalfLoaded("no memory"), ReplicaLost("gone")]))


@given(faults=st.lists(st.none() | FAULT, min_size=1, max_size=4))
def test_who_fails_in_a_broadcast_is_left_out_of_it(faults: list[tuple[int, Exception] | None]) -> None:
    group, read = Gathered(), Counter[str]()
    servers = [Server(group, fault) for fault in faults]
    pairs = ((name, tensor) for name, tensor in ones(5).items() if not read.update([name]))
    results = deliver(Broadcast(pairs, group, bucket_bytes=16), *servers)
    assert set(read.values()) == {1}
    for fault, server, result in zip(faults, servers, results, strict=True):
        failed = fault if fault is not None and fault[0] <= 5 else None
        assert result is (failed and failed[1])
        assert failed or server.tensors.keys() == read.keys()


def test_a_broadcast_whose_rank_0_fails_is_nobody_s_loss() -> None:
    group = Gathered()
    group.broken = True
    for error in deliver(Broadcast(ones(2), group), Server(group), Server(group)):
        assert type(error) is HalfLoaded
        assert str(error) == "rank 0 could not broadcast: Connection closed by peer"


class Ending(BroadcastGroup):
    """Notes that it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.over = asyncio.Event()

    def close(self) -> None:
        self.over.set()

    async def found(self, *asked: Coroutine[Any, Any, None]) -> list[Exception | None]:
        """Return what came of these while it forms."""
        return await self._together(asked, self.wait(), 60.0, FOUND_WITHIN)

    async def wait(self) -> None:
        await self.over.wait()
        raise HalfLoaded("it is over")


def test_a_group_that_forms_is_given_up_when_all_had_time_to_find_it() -> None:
    """However many refuse it at once: SGLang looks for half an hour for one that is gone."""

    async def body() -> None:
        group, refused = Ending(), [EngineError("no"), EngineError("neither")]

        async def refuse(error: EngineError) -> None:
            raise error

        async def find() -> None:
            await asyncio.sleep(FOUND_WITHIN / 2)
            assert not group.over.is_set()

        assert await group.found(refuse(refused[0]), find(), refuse(refused[1])) == [refused[0], None, refused[1]]

    run_virtual(body())


def test_who_waits_for_a_server_that_hangs_is_not_taken_for_another() -> None:
    async def body() -> None:
        group = Ending()
        hangs, waits = await group.found(asyncio.Event().wait(), group.wait())  # type: ignore[arg-type]
        assert (type(hangs), type(waits)) == (ReplicaLost, _Interrupted)

    run_virtual(body())


def test_a_broadcast_is_for_servers() -> None:
    (error,) = deliver(Broadcast(ones(2)), Taker())
    assert "a broadcast is for servers, and this engine is none; give its weights as Tensors" in str(error)


def test_what_are_no_weights_is_said() -> None:
    with pytest.raises(EngineError, match=r"got a list \(pairs of names and tensors go into fsm_rollout\.Tensors\)"):
        as_source([("w", torch.ones(1))])  # type: ignore[arg-type]
    (error,) = deliver(Tensors(lambda: [("w", 1.0)]), Taker())  # type: ignore[arg-type,return-value]
    assert "new weight 'w' is a float; weights are torch tensors by name" in str(error)


HALVES = {f"base_model.model.w.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"peft_type": "IA3"}, {}, "it is no LoRA adapter: peft_type is 'IA3'"),
        ({"r": 0}, {}, "adapter_config.json' cannot be read"),
        ({"bias": "all"}, {}, "has bias 'all', and plain LoRA is loaded only"),
        ({}, {"base_model.model.w.lora_A.weight": torch.ones(2, 2)}, "is no half of a pair"),
        ({}, {name: tensor / 0 for name, tensor in HALVES.items()}, "not finite: 0 NaN and 4 infinite"),
        ({}, {name.replace(".w.", ".u."): tensor for name, tensor in HALVES.items()}, "'u.weight', which the model"),
        ({}, {name: tensor[:1, :1] for name, tensor in HALVES.items()}, r"shape \[1, 1\], the model's has \[2, 2\]"),
    ],
)
def test_an_adapter_that_is_not_plain_or_of_another_model_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], says: str
) -> None:
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config
    (tmp_path / "adapter_config.json").write_text(json.dumps(about), "utf-8")
    save_file(tensors or HALVES, tmp_path / "adapter_model.safetensors")
    adapter = Adapter(tmp_path)

    def load() -> None:
        adapter.check()
        adapter.merged({"w.weight": torch.zeros(2, 2)})

    with pytest.raises(EngineError, match=says):
        load()


def test_an_adapter_whose_folder_has_changed_is_gone_and_replaces_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}', "utf-8")
    save_file(HALVES, tmp_path / "adapter_model.safetensors")
    adapter = Adapter(tmp_path)
    adapter.check()
    assert adapter.merged({"w.weight": torch.ones(2, 2)})["w.weight"].tolist() == [[5.0, 5.0], [5.0, 5.0]]
    (error,) = asyncio.run(adapter.deliver([Taker()], 1))  # type: ignore[list-item]
    assert "this engine takes no adapters" in str(error)
    tensors = Tensors(ones(1))
    tensors.whole()
    present = PresentWeights().with_update(tensors, 1).with_update(adapter, 2).with_update(adapter, 3)
    assert present.updates == ((tensors, 1), (adapter, 3))
    assert present.with_update(tensors, 4).updates == ((tensors, 4),)
    save_file({name: tensor * 2 for name, tensor in HALVES.items()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightsGone, match="give each version a folder of its own"):
        asyncio.run(adapter.deliver([], 1))


def test_who_gives_an_update_up_leaves_its_group() -> None:
    """A trainer may, whose servers are a service's: the next update's first bucket would be what is still sent."""

    async def body() -> None:
        group = Ending()
        sending = asyncio.create_task(group.found(asyncio.Event().wait()))  # type: ignore[arg-type]
        await asyncio.sleep(1)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        assert group.over.is_set()

    run_virtual(body())
