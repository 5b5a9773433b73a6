"""Mistakes that this package must never make in silence, as exact changes of its text.

Invariant: each ``old`` occurs exactly once in its file (a test holds that), and each mutant breaks the law that it
names, so a test of that law fails. Choose text that says what it does, not text that happens to be near.
"""

from __future__ import annotations

from dataclasses import dataclass

LAWS = ("tests/laws/test_laws.py::test_runs_keep_the_laws",)
TOOLS = ("tests/laws/test_laws.py::test_runs_with_real_tools_keep_the_laws",)
SCHEDULE = ("tests/laws/test_laws.py::test_results_do_not_depend_on_the_schedule",)
LIMITS = ("tests/unit/testing/test_limits_kept.py",)
ROWS = ("tests/unit/batch/test_batch.py",)
SUB_AGENTS = (
    "tests/unit/scheduler/test_resume.py::test_a_sub_agent_that_was_cut_off_goes_on_when_its_call_is_made_again",
    "tests/unit/scheduler/test_resume.py::test_sub_agents_are_carried_with_those_they_serve",
    "tests/unit/scheduler/test_resume.py::"
    "test_whoever_is_killed_and_resumed_however_often_rows_ids_and_order_are_those_of_one_run",
)
ENTRY = ("tests/unit/agent/test_limits.py",)
STATES = ("tests/unit/states/test_states.py",)
CLASSES = (
    "tests/unit/scheduler/test_failure_classes.py",
    "tests/unit/scheduler/test_failures.py::test_every_failure_has_its_class",
    "tests/unit/scheduler/test_failures.py::test_a_prompt_that_does_not_fit_is_the_data_s",
)
FAILURES = ("tests/unit/scheduler/test_failures.py",)
TRIALS = ("tests/unit/engines/test_bisection.py",)
DISPATCH = ("tests/unit/engines/test_client.py",)
RESUME = (
    "tests/laws/test_check_state.py::test_a_good_handler_that_does_everything_conforms",
    "tests/unit/scheduler/test_resume.py",
)
AGAIN = ("tests/unit/scheduler/test_resume.py::test_a_handler_of_many_steps_goes_on_from_any_of_them",)
REPLICAS = (
    "tests/laws/test_laws.py::test_an_answer_goes_on_where_its_lost_replica_stood_with_the_weights_of_now",
    "tests/laws/test_laws.py::test_results_do_not_depend_on_which_replicas_are_lost",
)
ROUTER = ("tests/unit/engines/test_router.py",)
MACHINE = ("tests/laws/test_scheduler_machine.py",)
SCHEDULER = ("tests/unit/scheduler/test_scheduler.py",)
LOOP = ("tests/unit/scheduler/test_training_loop.py",)
FOREIGN = ("tests/unit/states/test_external.py", "tests/laws/test_foreign_agents.py")


@dataclass(frozen=True)
class Mutant:
    """One mistake: where, what stands there, what it becomes, and what that breaks."""

    name: str
    file: str
    """Within ``fsm_rollout/``."""
    old: str
    new: str
    law: str
    tests: tuple[str, ...] = LAWS
    """Where its law is held, relative to the repository."""


MUTANTS = (
    # -- tokens, masks, logprobs, versions (laws 3, 4, 7)
    Mutant(
        "flip a mask span", "trajectory/tokens.py",
        "model and stream.trained, span.version",
        "model and stream.trained and span is not stream._spans[-1], span.version",
        "4: the mask is 1 exactly on sampled tokens",
    ),
    Mutant(
        "train on what an untrained engine says", "trajectory/tokens.py",
        "model and stream.trained, span.version", "model, span.version",
        "4: only trainable contexts have mask 1",
        ("tests/unit/trajectory/test_tokens.py", *LAWS),
    ),
    Mutant(
        "drop a token", "states/generation.py", "            ids=pending.ids[:],\n            logprobs=pending.logprobs[:],",
        "            ids=pending.ids[:1] + pending.ids[2:],\n            logprobs=pending.logprobs[:1] + pending.logprobs[2:],",
        "7: every sampled token is in the stream",
    ),
    Mutant(
        "duplicate a token", "engines/pending.py", "            self.ids.extend(ids)\n",
        "            self.ids.extend(ids[:1] * len(ids))\n",
        "7: every sampled token once, as it was sampled",
    ),
    Mutant(
        "shift logprobs by one", "states/generation.py", "        logprobs=pending.logprobs[:],",
        "        logprobs=pending.logprobs[1:] + pending.logprobs[:1],",
        "3: each logprob belongs to its token",
    ),
    Mutant(
        "logprobs on the environment's tokens", "trajectory/tokens.py", 'array("f", bytes(4 * len(ids)))',
        'array("f", [-1.0] * len(ids))',
        "4: logprob 0.0 where nothing was sampled",
    ),
    Mutant(
        "one version for all tokens", "engines/pending.py",
        "if self.versions and self.versions[-1][1] == version:",
        "if self.versions:",
        "3: each token has the version that sampled it",
        (*SCHEDULER, *MACHINE, *LAWS),
    ),
    Mutant(
        "the prompt counts as response", "trajectory/tokens.py", "        return self._spans[0].end\n",
        "        return max(0, self._spans[0].end - 1)\n",
        "4: a prompt is no response",
        ("tests/unit/trajectory/test_tokens.py", *ROWS),
    ),
    Mutant(
        "ask for all routed experts in each turn", "trajectory/tokens.py",
        "            if note.kind is NoteKind.ROUTED_EXPERTS and note.start <= length:\n", "            if False:\n",
        "a turn costs what is new in it",
        ("tests/unit/test_rollout.py",),
    ),
    Mutant(
        "routed experts of the next token", "batch/rows.py", "experts[note.start : note.end] = np.reshape",
        "experts[note.start : note.end] = -1\n                experts[note.start + 1 : note.end + 1] = np.reshape",
        "a row has for each token what the engine said of it",
        ROWS,
    ),
    # -- input extends input (law 5)
    Mutant(
        "re-encode a turn", "states/generation.py", "            ids=stream.tokens.ids,\n            sampling=",
        "            ids=as_ids(bound.client.engine.tokenizer.encode(bound.chat.decode(stream.tokens.ids) + \" \")),\n"
        "            sampling=",
        "5: sampled ids are never decoded and encoded again",
    ),
    Mutant(
        "retry from scratch", "engines/client.py",
        "request = pending.request.continued(pending.ids, pending.request_id)",
        "request = pending.request.continued(pending.ids[:0], pending.request_id)",
        "5: a failed request goes on from what was streamed",
        (*DISPATCH, *LAWS),
    ),
    Mutant(
        "tell the model its results in order of completion", "states/built_in.py",
        "        for attempt in trajectory.attempts:\n            called = results[attempt.id]",
        "        for called in trajectory.called:",
        "6: tool messages stand in the order of the calls",
        (*SCHEDULER, *TOOLS),
    ),
    Mutant(
        "seeds reused", "states/generation.py", "seed=derive_seed(trajectory.seed, bound.name, index)",
        "seed=derive_seed(trajectory.seed, bound.name)",
        "6: no two generations share their randomness",
        SCHEDULE,
    ),
    Mutant(
        "a seed for the run alone", "scheduler/trajectory_starter.py", "derive_seed(self.seed, trajectory_id,",
        "derive_seed(self.seed, sample,",
        "6: no two trajectories share their randomness",
        SCHEDULE,
    ),
    # -- limits (law 2)
    Mutant(
        "ignore assistant_turns, tool_calls and user_turns", "agent/limits.py",
        "remaining(graph, trajectory, spends, trajectory.spent.get(spends, 0)) < 0",
        "remaining(graph, trajectory, spends, 0) < 0",
        "2: a counted limit is never exceeded",
    ),
    Mutant(
        "a limit of N allows N + 1", "agent/limits.py", "    return bound - used\n", "    return bound - used + 1\n",
        "2: a bound N allows N",
    ),
    Mutant(
        "ignore max_visits", "agent/limits.py",
        "if max_visits is not None and trajectory.visits[trajectory.state] > max_visits:",
        "if max_visits is not None and trajectory.visits[trajectory.state] > max_visits + 1:",
        "2: no state is visited more often than it may be",
        LIMITS,
    ),
    Mutant(
        "ignore response_tokens", "states/generation.py",
        "LimitName.RESPONSE_TOKENS: self.visit.remaining(LimitName.RESPONSE_TOKENS) - added,",
        'LimitName.RESPONSE_TOKENS: float("inf"),',
        "2: no more response tokens than allowed",
        (*LIMITS, *TOOLS),
    ),
    Mutant(
        "ignore context_tokens", "states/generation.py",
        "LimitName.CONTEXT_TOKENS: self.visit.room_in_context(self.bound, length),",
        "LimitName.CONTEXT_TOKENS: self.bound.client.engine.max_context - length,",
        "2: no stream is longer than allowed",
        (*LIMITS, *TOOLS),
    ),
    Mutant(
        "ignore wall_seconds", "scheduler/trajectory_runner.py", 'timeout, None if wall == float("inf") else wall, ', "timeout, None, ",
        "2: time is up when it is up",
        SCHEDULER,
    ),
    Mutant(
        "let a wait for the engine hold up wall_seconds", "concurrency/deadline.py",
        "            return self._wall\n", "            return self._wall if self._remaining is None else None\n",
        "2: time is up when it is up",
        ("tests/unit/concurrency/test_deadline.py",),
    ),
    Mutant(
        "record generations side by side as they end", "states/generation.py", "            await self._wait_for_earlier()\n", "",
        "6: results do not depend on the schedule",
        SCHEDULER,
    ),
    Mutant(
        "ignore bad_calls", "states/built_in.py", "        ctx.check(LimitName.BAD_CALLS)\n", "",
        "2: no more bad calls than allowed",
        LIMITS,
    ),
    Mutant(
        "forget which limits were routed", "trajectory/trajectory.py",
        "self.routed_limits |= {routing_key(str(event.limit), event.source)}", "pass",
        "2: a limit is routed once",
        LIMITS,
    ),
    Mutant(
        "glue that leaves no room", "states/generation.py",
        "        self._room_after_glue = self._room(len(stream.tokens) + len(encoded.ids), len(encoded.ids))\n", "",
        "2: nothing is written that leaves no room for a token",
        LIMITS,
    ),
    # -- every prompt comes back (law 8)
    Mutant(
        "lose an aborted trajectory", "scheduler/sample_runner.py", "            run.running -= 1\n            group.unfinished -= 1\n",
        "            run.running -= 1\n            group.unfinished -= getattr(group.latest(sample), \"stop_reason\", None) != \"cancelled\"\n",
        "8: a cancelled trajectory comes back as well",
        MACHINE,
    ),
    Mutant(
        "lose what an aborted generation had sampled", "states/generation.py",
        "                record()\n            raise", "                pass\n            raise",
        "7: tokens sampled before an abort are kept",
        (*SCHEDULER, *MACHINE),
    ),
    Mutant(
        "swallow a cancellation", "states/generation.py",
        "                record()\n            raise\n        generated", "                record()\n        generated",
        "8: what is stopped stops",
        (*MACHINE, *SCHEDULER),
    ),
    Mutant(
        "leave the engine's work running", "engines/client.py",
        "        try:\n            self._abort_soon(pending.request_id)\n            with suppress",
        "        try:\n            with suppress",
        "8: nothing is running afterwards",
        MACHINE,
    ),
    Mutant(
        "what has ended does not grow old", "scheduler/staleness.py",
        "if (done or t.ended) and self.end_of(group, t) is not None]", "if False]",
        "nothing older than `max_staleness` is handed over",
        LOOP,
    ),
    Mutant(
        "forget what was being trained on", "scheduler/scheduler.py",
        "                        yield group\n",
        "                        self._mark_delivered()\n                        yield group\n",
        "8: after a crash, each group comes at least once",
        LOOP,
    ),
    Mutant(
        "swap group ids", "scheduler/group.py",
        '        return f"{self.group_id}/{sample}" + ',
        '        return f"{self.group_id[::-1]}/{sample}" + ',
        "8: a group has the samples of its prompt",
    ),
    Mutant(
        "a crash is the end", "engines/client.py", "        if pending.failures >= self.attempts:", "        if True:",
        "8: a failure that mends is no failure",
        DISPATCH,
    ),
    Mutant(
        "who fails with others has to answer for it", "engines/client.py",
        "        if maybe_shared and (self._sent or self._bisection.busy):", "        if False:",
        "8: a request is given up only for failures of its own",
        TRIALS,
    ),
    Mutant(
        "hold all others while parts are tried", "engines/bisection.py",
        "        return len(part) == 1\n", "        return bool(part)\n",
        "requests that have not failed go on while a culprit is looked for",
        ("tests/unit/engines/test_bisection.py::test_others_go_on_while_one_is_looked_for",),
    ),
    Mutant(
        "count a delivered group that was dropped later", "scheduler/scheduler.py",
        "                        self._run.counted.discard(group.group_id)\n", "                        pass\n",
        "a target is reached by groups that count",
        ("tests/unit/scheduler/test_scheduler.py::test_a_target_is_reached_though_wrong_glue_is_found_late",),
    ),
    Mutant(
        "try all that failed one by one", "engines/bisection.py", "if pending.shared > 1]\n            if suspects:", "if False]\n            if suspects:",
        "8: a poisoned request is found in halves",
        TRIALS,
    ),
    Mutant(
        "an answer is taken as it comes", "engines/answer_check.py", "    if lowest < 0 or (vocabulary is not None and highest >= vocabulary):",
        "    if False:",
        "3: no token that is none of the model's gets into a row",
        TRIALS,
    ),
    Mutant(
        "a logprob may be anything", "engines/answer_check.py", "    if most > ROUNDING:", "    if most > 1.0:",
        "3: a logprob is at most 0",
        TRIALS,
    ),
    Mutant(
        "a version may be anything", "engines/answer_check.py", "    if not 0 <= version <= LAST_VERSION:", "    if version > LAST_VERSION:",
        "3: a weight version is one that a batch can hold",
        TRIALS,
    ),
    Mutant(
        "go on behind a stop token", "engines/answer_check.py", "(before and before[-1] in sampling.stop_ids) or at is not None:",
        "at is not None:",
        "3: a stop token ends a turn",
        TRIALS,
    ),
    Mutant(
        "take one token too many", "engines/answer_check.py", "    if len(before) + count > sampling.max_tokens:",
        "    if len(before) + count > sampling.max_tokens + 1:",
        "2: no more tokens than were asked for",
        TRIALS,
    ),
    Mutant(
        "nothing is an answer", "engines/client.py", "is not None and not (pending.ids or pending.aborted):", "is not None and False:",
        "8: what says nothing has failed",
        TRIALS,
    ),
    Mutant(
        "every error is the environment's", "scheduler/failure_policy.py", "for kind in type(error).__mro__ if", "for kind in () if",
        "each failure has its class",
        FAILURES,
    ),
    Mutant(
        "a failure says nothing of itself", "scheduler/failure_policy.py", "isinstance(error, RolloutError) and error.failure is not None",
        "False",
        "each failure has its class: a tool's by whose fault it was",
        FAILURES,
    ),
    Mutant(
        "a tool's time is the environment's", "scheduler/failure_policy.py", "    LimitName.TOOL_CALLS: FailureClass.TOOL,\n", "",
        "each failure has its class: a timeout by what was waited for",
        FAILURES,
    ),
    Mutant(
        "a recovered failure is one in the end", "agent/machine.py", "if self.index is None or outcome.trigger == Trigger.FAILED else None",
        "if self.index is None else None",
        "a failure that a transition takes to an end is still one",
        FAILURES,
    ),
    Mutant(
        "end a sub-agent that is cut off", "states/active_trajectory.py", "stopped.stop if isinstance(stopped.stop, Suspension) else", "",
        "6: a sub-agent goes on where its caller was interrupted",
        SUB_AGENTS,
    ),
    Mutant(
        "call a sub-agent anew that had ended", "scheduler/trajectory_starter.py", "        elif child.stop_reason == StopReason.CANCELLED:",
        "        elif child.ended:",
        "6: a call whose answer was not recorded is not made twice",
        SUB_AGENTS,
    ),
    Mutant(
        "number sub-agents as they come", "scheduler/group.py", "        self.children.sort(key=self._place)\n", "",
        "6: rows stand in the same order wherever a run was cut off",
        SUB_AGENTS,
    ),
    Mutant(
        "score what failed by no fault of the policy's", "scheduler/scoring.py", "if trajectory.ended and is_the_policys(trajectory)]",
        "if trajectory.ended]",
        "13: what is not the policy's failure has no score",
        FAILURES,
    ),
    Mutant(
        "blame the policy for nothing", "scheduler/failure_policy.py", "    return trajectory.failure in (None, FailureClass.POLICY)",
        "    return trajectory.failure is None",
        "what the policy failed itself is scored",
        FAILURES,
    ),
    Mutant(
        "repeat for ever", "scheduler/failure_policy.py", "or earlier >= getattr(settings, \"repeats\", 0):",
        "or earlier > getattr(settings, \"repeats\", 0):",
        "a sample is repeated within its budget",
        FAILURES,
    ),
    Mutant(
        "what failed before an interruption stands", "scheduler/sample_runner.py",
        "if self.pause_before_repeat(group, ended) is not None:", "if False:",
        "a budget holds over interruptions",
        FAILURES,
    ),
    Mutant(
        "the breaker counts the policy's failures", "scheduler/failure_policy.py",
        "failed = [latest for latest in self.latest if latest.failure is not None and not is_the_policys(latest)]",
        "failed = [latest for latest in self.latest if latest.failure is not None]",
        "a policy that reaches its limits stops no run",
        FAILURES,
    ),
    Mutant(
        "the breaker never breaks", "scheduler/failure_policy.py", "and failed >= breaker.share * breaker.window", "and failed > breaker.window",
        "a run in which nearly everything fails stops",
        FAILURES,
    ),
    Mutant(
        "stop for no class", "scheduler/failure_policy.py", "self._failures.of(failure).do == \"stop\":", "False:",
        "a class may stop the run",
        FAILURES,
    ),
    Mutant(
        "let a second pass before the time is up", "agent/limits.py",
        "if remaining(graph, trajectory, LimitName.WALL_SECONDS, trajectory.elapsed(now)) <= 0:",
        "if remaining(graph, trajectory, LimitName.WALL_SECONDS, trajectory.elapsed(now)) <= -1:",
        "2: time is up when it is up",
        ENTRY,
    ),
    Mutant(
        "name another limit first", "agent/limits.py",
        "if max_visits is not None and trajectory.visits[trajectory.state] > max_visits:\n        return LimitName.MAX_VISITS\n",
        "if spends is not None and trajectory.spent.get(spends, 0) > 9e9:\n        return LimitName.MAX_VISITS\n",
        "2: no state is visited more often than it may be",
        ENTRY,
    ),
    Mutant(
        "a prompt raises a limit", "trajectory/settings.py",
        "min((v for v in (own[name], lower[name]) if v is not None), default=None)",
        "max((v for v in (own[name], lower[name]) if v is not None), default=None)",
        "2: a prompt lowers limits and never raises one",
        ENTRY,
    ),
    Mutant(
        "contexts share their randomness", "states/generation.py", "seed=derive_seed(trajectory.seed, bound.name, index),",
        "seed=derive_seed(trajectory.seed, index),",
        "6: no two contexts share their randomness",
        STATES,
    ),
    Mutant(
        "call again what an earlier visit has called", "states/built_in.py", "if attempt.id not in finished_before]", "]",
        "6: a call is made once",
        STATES,
    ),
    Mutant(
        "ignore parallel", "states/built_in.py", "asyncio.Semaphore(self.spec.parallel or 2**31)", "asyncio.Semaphore(2**31)",
        "no more calls at once than `parallel` says",
        STATES,
    ),
    Mutant(
        "a prompt raises max_tokens", "trajectory/settings.py", 'update={"max_tokens": min(bounds, default=None)}',
        'update={"max_tokens": max(bounds, default=None)}',
        "2: a prompt lowers max_tokens and never raises it",
        STATES,
    ),
    Mutant(
        "a filter that fails drops its group", "environment/rewards.py",
        "failed; the group is kept\", self.name)\n            return True", "failed; the group is kept\", self.name)\n            return False",
        "8: no sample is lost to a filter's mistake",
        ("tests/unit/environment/test_rewards.py",),
    ),
    Mutant(
        "a lost replica is the engine's failure", "scheduler/failure_policy.py", "    ReplicaLost: FailureClass.INFRASTRUCTURE,", "    ReplicaLost: FailureClass.ENGINE,",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "a prompt that is too long is the engine's failure", "scheduler/failure_policy.py", "    PromptTooLong: FailureClass.DATA,", "    PromptTooLong: FailureClass.ENGINE,",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "the engine's failure is the policy's", "scheduler/failure_policy.py", "    EngineError: FailureClass.ENGINE,", "    EngineError: FailureClass.POLICY,",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "a tool's failure is the policy's", "scheduler/failure_policy.py", "    ToolError: FailureClass.TOOL,", "    ToolError: FailureClass.POLICY,",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "lost memory is the environment's failure", "scheduler/failure_policy.py", "    MemoryError: FailureClass.INFRASTRUCTURE,\n", "",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "an agent's own error is the policy's", "scheduler/failure_policy.py", "return next(found, FailureClass.ENVIRONMENT)", "return next(found, FailureClass.POLICY)",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "a reached limit is nobody's failure", "trajectory/outcome.py", "            case Trigger.LIMIT_REACHED | Trigger.TRUNCATED:",
        "            case Trigger.TRUNCATED:",
        "each failure has its class",
        CLASSES,
    ),
    Mutant(
        "never say what is waited for", "scheduler/recorder.py", "        elif waits := self._waits():", "        elif waits := []:",
        "a run that stands still says what it waits for",
        FAILURES,
    ),
    Mutant(
        "a busy run is said to stand still", "scheduler/recorder.py", "            self._stalls.heard = True\n", "",
        "a run that works says nothing",
        FAILURES,
    ),
    Mutant(
        "ask the replica that failed", "engines/router.py", "if replica.name != request.avoids]", "if replica.name]",
        "what a replica has failed is tried elsewhere where the policy says so",
        ROUTER,
    ),
    Mutant(
        "take a broken call for an answer", "states/generation.py",
        "            attempts.append(MalformedCall(id=call_id, kind=item.kind, message=item.message))",
        "            continue",
        "no broken call is dropped",
        (*LIMITS, *TOOLS),
    ),
    Mutant(
        "drop an unfinished call", "chat/formats/base.py",
        "                collector.problem(broken, (opening.start(), at))",
        "                if broken.kind != \"unclosed\":\n                    collector.problem(broken, (opening.start(), at))",
        "no broken call is dropped",
        ("tests/laws/test_check_tool_format.py",),
    ),
    # -- resume (law 6)
    Mutant(
        "a resumed visit writes its prompt again", "states/visit.py",
        "        if self._entry is not None:\n", "        if False:\n",
        "6: where a run was interrupted does not matter",
        AGAIN,
    ),
    Mutant(
        "a resumed visit does again what it had done", "states/effect_log.py", "return recorded.popleft() if recorded else None",
        "return None",
        "6: where a run was interrupted does not matter",
        RESUME,
    ),
    Mutant(
        "a resumed generation is another one", "states/generation.py",
        "resumed = continued and stream.finish_reason == FinishReason.ABORT", "resumed = False",
        "6: an aborted generation goes on as the same one",
        RESUME,
    ),
    # -- replicas (laws 4, 6, 8)
    Mutant(
        "what a lost replica had begins anew", "engines/client.py",
        "        before = pending.request_id\n",
        "        before = pending.request_id\n        pending.ids = pending.ids[:0]\n",
        "7: what was streamed stays, and nothing is sampled twice",
        REPLICAS,
    ),
    Mutant(
        "what a lost replica had is forgotten", "engines/pool.py",
        "                self._give_back(routed, replica, why)\n            else:\n                not_asked",
        "                self._forget(routed)\n            else:\n                not_asked",
        "8: a lost replica loses no request",
        REPLICAS,
    ),
    Mutant(
        "a replica comes back with the weights it was built with", "engines/pool.py",
        "                    await replica.live.update_weights(shared, version)", "                    pass",
        "4: each token has the version that sampled it",
        REPLICAS,
    ),
    Mutant(
        "a session goes everywhere", "engines/router.py",
        "name = next((self._pins[key] for key in keys if key in self._pins), None)", "name = None",
        "requests stay where their prefix is cached",
        ROUTER,
    ),
    # -- rows and batches (laws 7, 9)
    Mutant(
        "a sub-agent's tokens in its parent's row", "scheduler/trajectory_starter.py",
        "prompt, child_id, sample, seed=call.seed", "prompt, parent_id, sample, seed=call.seed",
        "7: a sub-agent's tokens are rows of its own trajectory",
        SCHEDULER,
    ),
    Mutant(
        "padding off by one", "batch/padding.py",
        "[places[ragged]] = flat", "[places[ragged]] = np.roll(flat, 1)",
        "9: padding is invertible",
        ROWS,
    ),
    Mutant(
        "score on the wrong token", "batch/rows.py",
        "sums[last_trained] += trajectory.score",
        "sums[length - 1] += trajectory.score",
        "the score stands on the last trained token",
        ROWS,
    ),
    Mutant(
        "a row too few", "batch/rows.py", "    if not last_of_turn:\n", "    if len(last_of_turn) < 2:\n",
        "7: every trained token is in a row",
        ROWS,
    ),
    # -- foreign agents
    Mutant(
        "a fork loses a token of what it shares", "states/external/agent_histories.py",
        "        ids = stream.tokens.ids[:end]", "        ids = stream.tokens.ids[: end - 1]",
        "5: a fork goes on from the very tokens that it shares",
        FOREIGN,
    ),
    Mutant(
        "two calls at a time go on in one stream", "states/external/agent_histories.py",
        "if number == len(branch.turns) - 1 and not branch.asks:", "if number == len(branch.turns) - 1:",
        "5: a call's input is the history that it re-sent",
        FOREIGN,
    ),
    Mutant(
        "a body of another form is our own fault", "states/external/responding.py",
        "    except (AttributeError, KeyError, TypeError, ValueError) as error:  # something in it",
        "    except (AttributeError, KeyError) as error:  # something in it",
        "whatever a client sends is answered, or refused in words",
        ("tests/laws/test_foreign_bodies.py",),
    ),
    Mutant(
        "a conversation goes on for whoever knows its words", "serve/served_conversation.py",
        "chains_of([caller, model, sampling]", "chains_of([model, sampling]",
        "a conversation goes on only with the key that began it",
        ("tests/unit/serve/test_serve.py",),
    ),
    Mutant(
        "a wait for the caller counts as time", "states/context.py",
        "away=now - since, weight_version=version", "away=0.0, weight_version=version",
        "while it waits for its user a trajectory is set aside",
        ("tests/unit/serve/test_serve.py",),
    ),
    Mutant(
        "a retry is sampled anew", "states/external/agent_histories.py",
        "not turn.delivered and branch.chains", "False and branch.chains",
        "7: an answer that nobody had is not sampled twice",
        FOREIGN,
    ),
    Mutant(
        "wait for ever for a thread", "concurrency/loop_end.py",
        "threads.end(LEFT_AFTER)", "threads.end(10**6)",
        "a job that never ends keeps no event loop waiting",
        ("tests/unit/concurrency/test_loop_end.py::test_a_thread_that_never_ends_is_named_and_left",),
    ),
    # -- the journal: what is kept, and what a damaged one loses
    Mutant(
        'trust what a journal holds', 'trajectory/journal/reader.py',
        'if why is None and checksum(payload, seq) != crc:',
        'if False:',
        'an event that is not what was written is damaged',
        ("tests/unit/trajectory/test_journal.py::test_a_damaged_event_costs_its_trajectory_the_rest_and_nothing_else",),
    ),
    Mutant(
        'read over a gap', 'trajectory/journal/reader.py',
        'why = "those before it are gone" if seq != len(history) else None',
        'why = None',
        'what is read of a trajectory is a prefix of what was written',
        ("tests/unit/trajectory/test_journal.py::test_what_follows_a_gap_is_not_read",),
    ),
    Mutant(
        'read on behind a damaged event', 'trajectory/journal/reader.py',
        '            trajectory = Trajectory.fold(history) if history else None\n            break\n',
        '            trajectory = Trajectory.fold(history) if history else None\n',
        'one damage is said once, and ends its trajectory',
        ("tests/unit/trajectory/test_journal.py::test_a_damaged_event_costs_its_trajectory_the_rest_and_nothing_else",),
    ),
    Mutant(
        'a place that is damaged ends its trajectory', 'trajectory/journal/reader.py',
        '        if displaced:\n',
        '        if False:\n',
        'what is damaged costs nothing that stands before it',
        ("tests/unit/trajectory/test_journal.py::test_an_event_whose_place_is_damaged_costs_those_before_it_nothing",),
    ),
    Mutant(
        'give a row the place of its last event', 'trajectory/journal/writer.py',
        'return events_row(events[0][0], events[0][1], encoded, any(ended))',
        'return events_row(events[0][0], events[-1][1], encoded, any(ended))',
        'a row stands at the place of its first event',
        ("tests/unit/trajectory/test_journal.py::test_the_facts_of_the_run_and_the_tables",),
    ),
    Mutant(
        'say of no row that a trajectory ended in it', 'trajectory/journal/writer.py',
        'return events_row(events[0][0], events[0][1], encoded, any(ended))',
        'return events_row(events[0][0], events[0][1], encoded, False)',
        'a group whose sample was set aside goes on though it was delivered',
        ("tests/unit/trajectory/test_journal.py::test_the_facts_of_the_run_and_the_tables",),
    ),
    Mutant(
        'trust an event of an earlier format', 'trajectory/journal/schema.py',
        'return checksum(pack([payload]), seq) if crc in (None, checksum(payload, seq)) else -1',
        'return checksum(pack([payload]), seq)',
        'what is damaged in an earlier format is damaged in the present one',
        (
            "tests/unit/trajectory/test_journal.py"
            "::test_a_damaged_journal_of_an_earlier_format_is_read_as_far_as_it_goes",
        ),
    ),
    Mutant(
        'close with a signal that may be lost', 'trajectory/journal/writer.py',
        '        self._commit(last=True)\n        self._appended.set()  # after the commit,',
        '        self._appended.set()\n        self._commit(last=True)  # after the commit,',
        'a journal can be closed at any moment',
        ("tests/unit/trajectory/test_journal.py::test_a_journal_is_closed_while_its_thread_is_about_to_wait",),
    ),
    Mutant(
        'forget the log of a damaged journal', 'trajectory/journal/salvage.py',
        '        if _log_of(path).is_file():\n',
        '        if False:\n',
        'what is in the log of a damaged journal is read too',
        ("tests/unit/trajectory/test_journal.py::test_what_is_in_the_log_of_a_damaged_journal_is_read_too",),
    ),
    Mutant(
        'salvage no trajectory', 'trajectory/journal/salvage.py',
        '                if isinstance(event, Prompted):\n',
        '                if isinstance(event, str):\n',
        'a page that is lost costs what stood in it alone',
        ("tests/laws/test_damaged_journals.py::test_each_page_can_be_lost",),
    ),
    Mutant(
        'ask before what was done is kept', 'scheduler/scheduler.py',
        'client.before_dispatch = journal.persist if journal is not None else None',
        'client.before_dispatch = None',
        'a turn is kept before its next generation is asked for',
        ("tests/unit/scheduler/test_durability.py::test_a_turns_events_are_kept_before_its_next_generation_is_asked_for",),
    ),
    Mutant(
        'keep it some time', 'trajectory/journal/writer.py',
        '            self._commit()  # also when there is nothing new: the thread may be at work on the rest\n',
        '            self._appended.set()\n',
        'what is to be kept is kept when that returns',
        ("tests/unit/trajectory/test_journal.py::test_what_was_appended_is_kept_when_it_is_asked_for",),
    ),
    Mutant(
        'call before it is kept that a call begins', 'scheduler/recorder.py',
        '                self.journal.persist()  # this call must not be made twice, so a resumed run has to know of it',
        '                pass  # this call must not be made twice, so a resumed run has to know of it',
        'a call that must not be made twice is known to have begun',
        ("tests/unit/scheduler/test_durability.py::test_that_a_call_has_begun_is_kept_before_it_is_made",),
    ),
    Mutant(
        'write on after a write that failed', 'trajectory/journal/writer.py',
        '            if rows and self._failure is None:\n',
        '            if rows:\n',
        'a journal has no gap',
        ("tests/unit/trajectory/test_journal.py::test_nothing_is_written_after_a_write_that_failed",),
    ),
    Mutant(
        'say nothing of a write that failed', 'trajectory/journal/writer.py',
        '        except (sqlite3.Error, OSError) as error:\n            self._failure = error\n        finally:',
        '        except (sqlite3.Error, OSError):\n            pass\n        finally:',
        'a disk that is full is told',
        ("tests/unit/trajectory/test_journal.py::test_a_write_that_fails_is_told_and_what_is_there_stays_whole",),
    ),
    Mutant(
        'let two write one journal', 'trajectory/journal/writer.py',
        '            if "locked" in str(error):\n                raise\n',
        '            if "locked" in str(error):\n                pass\n',
        'one process at a time writes a journal',
        ("tests/unit/trajectory/test_journal.py::test_only_a_journal_that_nobody_writes_goes_on",),
    ),
    Mutant(
        'throw a damaged journal away', 'trajectory/journal/writer.py',
        '    if damages:\n        kept =',
        '    if not damages:\n        kept =',
        'a damaged journal is kept beside the one that goes on',
        ("tests/unit/trajectory/test_journal.py::test_a_damaged_journal_goes_on_with_the_rest",),
    ),
    Mutant(
        'go on with a table that cannot be read', 'trajectory/journal/writer.py',
        'connection.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)',
        'True',
        'a journal that goes on is whole',
        ("tests/unit/trajectory/test_journal.py::test_a_table_that_only_an_index_still_answers_for_is_made_anew",),
    ),
    Mutant(
        'read a journal of the future', 'trajectory/journal/reader.py',
        '        if form > FORMAT:\n',
        '        if False:\n',
        'a later format is refused, with what to do',
        ("tests/unit/trajectory/test_journal.py::test_a_newer_format_says_so",),
    ),
    # -- workers and processes of tools
    Mutant(
        'read a pickle from a worker', 'scheduler/worker_link.py',
        'pickle.loads(block) if self._worker else _decode(block)',
        'pickle.loads(block)',
        'what tools can write is never unpickled',
        ("tests/unit/scheduler/test_workers.py::test_a_pickle_that_a_tool_sends_down_its_workers_link_runs_nowhere",),
    ),
    Mutant(
        "a dead worker's trajectories are over", 'scheduler/worker_pool.py',
        '                running.over.set_result(False)\n',
        '                running.over.set_result(True)\n',
        'what a dead worker ran goes on in another',
        ("tests/laws/test_laws.py::test_a_worker_that_is_killed_at_ten_points_loses_nothing",),
    ),
    Mutant(
        'each worker has all slots of a tool', 'scheduler/worker.py',
        '            agent.toolbox.share = setup.count\n',
        '            agent.toolbox.share = 1\n',
        'the slots of a tool are those of the run',
        ("tests/unit/scheduler/test_workers.py::test_a_tools_slots_are_shared_among_the_workers",),
    ),
    Mutant(
        'a hidden value arrives as something else', 'tools/placement.py',
        '.hidden != hidden:',
        '.hidden is None:',
        'what arrives elsewhere is what was sent',
        ("tests/integration/test_process_placement.py::test_hidden_values_that_cannot_be_sent_are_refused_before_anything_runs",),
    ),
    Mutant(
        'arguments arrive as they were written', 'tools/placement.py',
        '**parameters.read(request.arguments), **contexts)',
        '**request.arguments, **contexts)',
        "arguments are the function's own types, wherever it runs",
        ("tests/integration/test_process_placement.py::test_arguments_arrive_elsewhere_as_the_functions_own_types[process]",),
    ),
    # -- runs that are ended, and texts that are too long
    Mutant(
        'a preempted run is not suspended', 'concurrency/interruption.py',
        'SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)',
        'SIGNALS = (signal.SIGINT, signal.SIGHUP)',
        'SIGTERM lets a run clean up',
        ("tests/unit/concurrency/test_interruption.py::test_the_first_signal_lets_the_coroutine_clean_up",),
    ),
    Mutant(
        'tokenise whatever a tool returns', 'tools/tool_messages.py',
        '    if dropped <= 0:\n        return text, 0\n    first = _beginning(EXACT',
        '    if dropped <= 10**9:\n        return text, 0\n    first = _beginning(EXACT',
        'a result that nothing bounds is cut before it is tokenised',
        ("tests/unit/tools/test_toolbox.py::test_a_result_that_nothing_bounds_is_cut_before_it_is_tokenised",),
    ),
    # -- what is read back afterwards
    Mutant(
        'go on with the older attempt', 'scheduler/resume.py', 'if t.parent_id is None), key=_attempt)',
        'if t.parent_id is None), key=_attempt, reverse=True)',
        'the latest attempt at a sample stands',
        ("tests/unit/scheduler/test_failures.py::test_a_budget_holds_over_interruptions",),
    ),
    Mutant(
        'try again what must not be repeated', 'tools/toolbox.py', ' and tool.spec.may_repeat', '',
        'a call that must not be made twice is made once',
        ("tests/unit/scheduler/test_failures.py::test_a_call_may_be_made_again_before_the_model_is_told",),
    ),
    Mutant(
        'each block of a stream is the first', 'states/external/anthropic_dialect.py', 'int(self._has_text)', '0',
        'a call that follows text arrives whole',
        ("tests/unit/states/test_external.py::test_anthropic_s_protocol_gives_the_same_rows",),
    ),
    Mutant(
        'keep back what might be a call', 'states/external/responding.py',
        '                self.show(ending.reply.text)\n', '                pass\n',
        'the pieces of a text make up the text',
        ("tests/unit/states/test_external.py::test_text_is_streamed_as_it_comes_and_calls_when_they_are_whole",),
    ),
    Mutant(
        'an old score where there is no new one', 'jobs/rescore.py',
        'trajectory.score, trajectory.reward_parts = None, {}', 'trajectory.reward_parts = {}',
        'what cannot be judged again has no score',
        ("tests/unit/jobs/test_rescore.py::test_where_there_is_no_new_score_there_is_none",),
    ),
    Mutant(
        'judge groups whose samples never began', 'jobs/rescore.py', ' or len(ended) < size', '',
        'a group is judged whole',
        ("tests/unit/jobs/test_rescore.py::test_a_group_is_judged_when_all_of_its_samples_have_ended",),
    ),
    Mutant(
        'count an end twice', 'jobs/progress.py', 'self._open.pop(name, None) is not None', 'self._open.pop(name, None) is not self',
        'progress counts each trajectory once',
        ("tests/unit/jobs/test_progress.py::test_a_piped_run_says_at_once_that_engines_start_and_goes_on_saying_so",),
    ),
    Mutant(
        'score whoever spoke last', 'states/built_in.py', 'judged = trajectory.last_turn(self.spec.context)',
        'judged = trajectory.generations - 1',
        'a user scores the turn that it replies to',
        ("tests/unit/states/test_states.py::test_a_user_s_score_is_that_of_the_turn_that_it_replies_to",),
    ),
    Mutant(
        'sub-agents outlive the attempt they served', 'jobs/latest_attempts.py', 'range(sample, len(parts) + 1)',
        'range(len(parts), len(parts) + 1)',
        'what was given up is exported nowhere',
        ("tests/unit/jobs/test_latest_attempts.py",),
    ),
    Mutant(
        'one seed for all questions', 'states/context.py', 'derive_seed(self.trajectory.seed, "ask", engine, index)',
        'derive_seed(self.trajectory.seed, "ask", engine)',
        '6: no two questions share their randomness',
        ("tests/unit/states/test_states.py::test_no_two_questions_share_their_randomness",),
    ),
    Mutant(
        'of equal bounds the limit is named', 'states/generation.py', 'cut_by = min(bounds, key=bounds.__getitem__)',
        'cut_by = min(reversed(bounds), key=bounds.__getitem__)',
        'a turn that its own `max_tokens` cuts is truncated',
        ("tests/unit/states/test_states.py::test_of_equal_bounds_the_turn_s_own_cuts_it",),
    ),
    Mutant(
        "a sub-agent's failure is a repeat of its sample", 'scheduler/group.py',
        't.sample == sample and t.parent_id is None]', 't.sample == sample]',
        'a sample is repeated as often as it may be',
        ("tests/unit/scheduler/test_failures.py::test_what_a_sub_agent_failed_is_not_charged_to_its_sample",),
    ),
    Mutant(
        'time goes on after the end', 'trajectory/trajectory.py', 'event.at if self.ended_at is None else self.ended_at', 'event.at',
        'a trajectory took as long as it took',
        ("tests/unit/trajectory/test_trajectory.py::test_after_its_end_a_trajectory_takes_scores_only",),
    ),
    Mutant(
        'a score of 0 is none', 'adapters/slime.py', '"remove_sample": row.score is None', '"remove_sample": not row.score',
        '0 is a score',
        ("tests/trainers/test_laws.py::test_each_trained_token_arrives_once[slime]",),
    ),
    Mutant(
        'prompts have temperature 0', 'adapters/prime_rl.py', 'whole(row, row.temperatures, 1.0)',
        'whole(row, row.temperatures, 0.0)',
        'a logit is divided by the temperature',
        ("tests/trainers/test_laws.py::test_each_trained_token_arrives_once[prime_rl]",),
    ),
    Mutant(
        'count the prompt of the first turn', 'states/external/agent_histories.py', 'prompt_tokens=turn.start',
        'prompt_tokens=branch.turns[0].start',
        'usage is what stood before the turn',
        ("tests/unit/states/test_external.py::test_usage_counts_what_stood_before_the_turn_and_what_was_sampled",),
    ),
    Mutant(
        'write down a key', 'rollout.py', '"model", "run", "engine")', '"model", "run", "engine", "api_key")',
        'a key is in no journal',
        ("tests/unit/engines/openai/test_openai.py::test_a_key_is_in_no_journal",),
    ),
    Mutant(
        "record the run's YAML with its keys", 'jobs/run_config.py', 'if key != API_KEY or str(value)', 'if key or str(value)',
        'a key is in no journal',
        ("tests/unit/jobs/test_run_config.py::test_a_key_stands_in_the_users_own_file_alone",),
    ),
    Mutant(
        'cached tokens add up', 'engines/pending.py', 'max(self.cached_tokens, chunk.cached_tokens)',
        'self.cached_tokens + chunk.cached_tokens',
        'a prompt is cached once',
        ("tests/unit/engines/test_client.py::test_cached_tokens_are_those_of_the_prompt_however_often_an_engine_says_so",),
    ),
)  # fmt: skip
