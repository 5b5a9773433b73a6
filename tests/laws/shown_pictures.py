"""Runs in which handlers, tools and users show pictures, and what must hold of whatever they come to."""

import re
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.messages import in_parts
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.pictures import StoredPicture, in_form, picture_of
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.stream import Stream, media_of
from fsm_rollout.trajectory.tokens import collapsed
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.runs import SINGLE, TOOLS, agent, rows
from tests.vision import FAMILIES, PLACEHOLDERS, WITH_TOOLS


@cache
def processor(family: str) -> Any:
    return (FAMILIES | WITH_TOOLS)[family]()


@cache
def picture(seed: int) -> StoredPicture:
    rng = np.random.default_rng(seed)
    return picture_of(rng.integers(0, 256, (*rng.integers(8, 99, 2), 3), dtype=np.uint8))


def content(said: list[str | int]) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": picture(part)}
        for part in said
    ]


class Show(State):
    """Shows what the prompt says is to be shown next."""

    triggers = ("shown", "over")

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        turn = trajectory.visits[ctx.state] - 1
        if turn == len(trajectory.extra["then"]):
            return Outcome("over")
        ctx.write([{"role": "user", "content": content(trajectory.extra["then"][turn])}], context="main")
        return Outcome("shown")


SHOWS = {
    "states": {**SINGLE["states"], "SHOWING": {"handler": f"{__name__}:Show", "timeout": 100.0}},
    "transitions": rows(
        "PENDING prompted GENERATING", "GENERATING generated SHOWING", "SHOWING shown GENERATING",
        "SHOWING over TERMINATED",
    ),
}  # fmt: skip


GRAPH = agent(SHOWS)


def show(step: int, context: ToolContext) -> object:
    """Show what the prompt says.

    Args:
        step: Which of it.
    """
    source, said = context.extra["then"][step]
    assert source == "tool"
    return [part if isinstance(part, str) else picture(part) for part in said]


class Shower:
    """Replies with what the prompt says."""

    resumable = True

    def reply(self, conversation: Conversation) -> Reply:
        said = [said for source, said in conversation.extra["then"] if source == "user"]
        if conversation.replies == len(said):
            return Reply(None, done=True)
        parts = said[conversation.replies]
        if all(isinstance(part, str) for part in parts):
            return Reply("".join(parts))
        return Reply([part if isinstance(part, str) else picture(part) for part in parts])


TALKS = {
    "states": {
        **TOOLS["states"], **SINGLE["states"],
        "INTERACTING": {"interaction": {"use": f"{__name__}:Shower"}, "timeout": 100.0},
    },
    "tools": {"show": {"use": f"{__name__}:show", "timeout": 50.0}},
    "limits": {"assistant_turns": 9, "tool_calls": 9, "user_turns": 9, "wall_seconds": 1000.0},
    "transitions": rows(
        "PENDING prompted GENERATING", "GENERATING generated PROCESSING_TOOLS if has_tool_calls",
        "GENERATING generated INTERACTING", "PROCESSING_TOOLS tools_done GENERATING",
        "INTERACTING replied GENERATING", "INTERACTING interaction_done TERMINATED as answered",
    ),
}  # fmt: skip


IN_TURNS = agent(TALKS)


def crop(step: int) -> object:
    """Show a part.

    Args:
        step: Which.
    """
    return ["part", picture(10 + step)]


LOOKS = {
    "states": {**TOOLS["states"], **SINGLE["states"]},
    "tools": {"crop": {"use": f"{__name__}:crop", "timeout": 50.0}},
    "transitions": TOOLS["transitions"],
}


RESUMES = {"handler": "write", "reset": True, "prompt": "{{ pictures[0] }}{{ task }} Last seen: {{ pictures[-1] }}."}


COMPACTED = agent(
    LOOKS,
    states={**LOOKS["states"], "RESUMING": RESUMES},
    transitions=[
        *LOOKS["transitions"][:3],
        *rows("PROCESSING_TOOLS tools_done RESUMING", "RESUMING written GENERATING"),
    ],
)


ASKING = agent(LOOKS, tools={"ask": {"agent": agent(LOOKS, agent="helper"), "pictures": 2, "timeout": 150.0}})


CROP, SHOW = (
    f'<tool_call>\n{{"name": "{name}", "arguments": {{"step": %d}}}}\n</tool_call>' for name in ("crop", "show")
)


class Run:
    """A run of one family's model, played from a script, or by an ``engine``."""

    def __init__(
        self, family: str, script: Any, journal: Path, graph: AgentGraph = GRAPH, engine: ScriptedEngine | None = None
    ) -> None:
        self.processor, self.placeholder = processor(family), PLACEHOLDERS[family]
        self.engine = engine or ScriptedEngine(
            script, tokenizer=self.processor.tokenizer, processor=self.processor, log=True
        )
        client = EngineClient(self.engine)
        client.chats = CHATS.setdefault(family, {})
        self.journal = Journal(journal)
        self.scheduler = Scheduler({"a": graph}, {"policy": client}, journal=self.journal)

    async def go(self, prompt: Prompt, n: int = 2, **options: Any) -> list[Trajectory]:
        groups = [group async for group in self.scheduler.run([prompt], n, **options)]
        self.journal.close()
        return [trajectory for group in groups for trajectory in group.trajectories]

    @property
    def asked(self) -> list[Request]:
        return [line.what for line in self.engine.log if isinstance(line.what, Request)]


CHATS: dict[str, dict[object, ChatTemplate]] = {}


def prompt_of(said: list[list[str | int]]) -> Prompt:
    return Prompt(prompt_id="p", messages=({"role": "user", "content": "Look."},), then=said)


def all_whole(stream: Stream, eye: Any, placeholder: str) -> None:
    """Hold each picture of a stream to what the processor makes of it; no other ids stand for one."""
    ids, inside = stream.tokens.ids.tolist(), 0
    for span in stream.media:
        alone = eye(text=[placeholder], images=[span.picture.image()], add_special_tokens=False)
        assert ids[span.start : span.end] == list(alone["input_ids"][0])
        inside += ids[span.start : span.end].count(eye.image_token_id)
    assert ids.count(eye.image_token_id) == inside


def held(run: Run, trajectory: Trajectory) -> list[StoredPicture]:
    """Hold each stream of a trajectory to the processor, the template, the engine's log and the batch.

    Return what they show.
    """
    eye, pictures = run.processor, list[StoredPicture]()
    for stream in trajectory.streams:
        ids, media = stream.tokens.ids, stream.media
        # 1. The pictures of its messages, each as the processor makes it, and no other ids that stand for one.
        assert [span.picture for span in media] == [
            part["image"] for message in stream.messages[: stream.glued] for part in media_of(message)
        ]
        all_whole(stream, eye, run.placeholder)
        # 2. Cut at its spans, it is what the template writes, with a mark for each picture.
        (its,) = [found for found in run.scheduler.agents.all if found.graph.agent == trajectory.agent]
        tools = [tool.schema for tool in its.toolbox.tools_of(stream.context).values()] or None
        messages = [
            in_form(in_parts(message), lambda _: {"type": "image"}) for message in stream.messages[: stream.glued]
        ]
        text = eye.apply_chat_template(messages, tools=tools, tokenize=False)
        assert bare(text) == bare(eye.tokenizer.decode(collapsed(ids, media)))
        # 3. Nothing of a picture is trained on, and the engine was asked with what the stream holds.
        trained = [*[0] * stream.tokens.prompt_length, *stream.tokens.response_mask()]
        assert not any(any(trained[span.start : span.end]) for span in media)
        asked = [
            request
            for request in run.asked
            if request.trajectory_id == trajectory.trajectory_id
            and request.session.endswith(f"{stream.context}/{stream.number + 1}")
        ]
        assert asked
        for request in asked:
            assert request.ids == ids[: len(request.ids)]
            assert list(request.media) == [span for span in media if span.end <= len(request.ids)]
        # 4. What a trainer feeds its model is what the processor makes of what the engine was asked with.
        pictures += [span.picture for span in media]
        if media and media[-1].end <= len(asked[-1].ids):
            batch = TrajectoryBatch.from_trajectories([trajectory], pad_id=0, processor=eye)
            names = [(row.context, row.stream) for row in batch.rows()]
            if (stream.context, stream.number) in names:
                row = names.index((stream.context, stream.number))
                assert [span.picture for span in batch.media(row)] == [span.picture for span in asked[-1].media]
                images = [span.picture.image() for span in asked[-1].media]
                made = eye(text=[run.placeholder * len(images)], images=images, return_tensors="pt")
                fed = batch.tensordict["multi_modal_inputs"].tolist()[row]
                assert digest(fed["pixel_values"]) == digest(made["pixel_values"])
    return pictures


def bare(text: str) -> str:
    """Return it without what ends turns, which a model may do in its own way, and white space."""
    return re.sub(r"<\|im_end\|>|<end_of_turn>|</s>|\s+", "", text)


def digest(values: Any) -> str:
    return sha256(values.contiguous().numpy().tobytes()).hexdigest()


Plan = list[tuple[str, list[str | int]]]


def in_turns(plan: Plan, folder: Path, family: str) -> tuple[Run, Prompt]:
    """Return a run whose model calls the tool or speaks to the user, as planned, and the prompt for that."""
    script = [SHOW % step if source == "tool" else "It is so." for step, (source, _) in enumerate(plan)]
    first: Any = {"role": "user", "content": content(["Look", 5, "."])}
    prompt = Prompt(prompt_id="p", messages=(first,), then=[list(each) for each in plan])
    return Run(family, [*script, "It is so."], folder / "journal.sqlite", IN_TURNS), prompt
