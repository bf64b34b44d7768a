"""No call waits forever: every blocking call in the source has a deadline, or a reason why it needs none."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = sorted(path for folder in ("rlpack", "workers", "recipes") for path in (ROOT / folder).rglob("*.py"))

# Methods and functions by how their deadline is given. The names of modules tell `ray.get` from `dict.get`.
BY_KEYWORD = {
    *("ray.get", "ray.wait", "asyncio.wait", "futures.wait", "as_completed", "wait_for", "communicate"),
    *("subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output"),
    *("urlopen", "create_connection", "acquire", "monitored_barrier"),
    *("init_process_group", "new_group", "TCPStore", "FileStore"),
    *(f"{client}.{call}" for client in ("httpx", "requests") for call in ("get", "post", "put", "request", "stream")),
    *("httpx.Client", "httpx.AsyncClient", "HTTPConnection", "HTTPSConnection"),
}
# What Ray's daemons answer, and so may never: it has to be asked by `ask_ray`, which has a deadline.
ASKED = {
    *(f"ray.{name}" for name in ("nodes", "available_resources", "cluster_resources", "get_actor", "init", "shutdown")),
    *("ray.kill", "ray.cancel", "ray.timeline"),
    *("placement_group", "remove_placement_group", "placement_group_table", "get_placement_group"),
    *("available_resources_per_node", "total_resources_per_node", "list_actors", "list_nodes", "list_tasks"),
}
BY_ANY_ARGUMENT = {"result", "wait", "join", "poll", "get", "select.select", "exception"}
NEVER = {"recv", "recv_bytes", "recv_into", "recvfrom", "recv_fds", "accept", "barrier", "input", "getch", "sigwait"}
WITH_A_FLAG = {"waitpid": "WNOHANG", "waitid": "WNOHANG", "lockf": "LOCK_NB", "flock": "LOCK_NB"}
# Leaving `with ThreadPoolExecutor(...)` waits for its threads.
CONTEXTS = {"ThreadPoolExecutor", "ProcessPoolExecutor", "Pool"}
# These wait for nothing, `get` of a queue and `poll` of a selector do.
NO_WAITS = {"_CURRENT.get", "HydraConfig.get", "process.poll"}

# Calls without an argument for a deadline, by the reason why they end.
BOUNDED = {
    "the value of a context variable": {
        "rlpack/models/kernel_device.py: _simulated_device.get()",
        "rlpack/models/routing.py: _current.get()",
    },
    "the result of a role's call: `RayRanks` waits for it by placement.call_timeout_s": {
        "rlpack/distributed/worker_group.py: self.submit(method, *args, **kwargs).result()",
        "rlpack/distributed/worker_group.py: pending.result()",
        "rlpack/distributed/shared_folder.py: answer.result()",
        "recipes/driver/evaluation.py: pending.result()",
        "recipes/driver/off_policy.py: submit().result()",
        "recipes/driver/performance.py: self.peaks[role].result()",
        "recipes/driver/policy_stages.py: pending.result()",
        "recipes/driver/policy_stages.py: submit().result()",
        "recipes/driver/policy_stages.py: update.result()",
        "recipes/driver/step_context.py: self.submit().result()",
        "recipes/driver/reward_stages.py: pending.result()",
        "recipes/driver/reward_stages.py: pending.result(on_scored=partial(_count_flops, session))",
        "recipes/driver/engine_restarts.py: "
        "rollout.ranks.submit(Call(rollout.role, method.__name__, no_arguments, {}, starts=starts)).result()",
        "recipes/driver/router.py: calls.pop(rank).pending.result()",
        "recipes/preflight/reward_smoke_test.py: rewards.result()",
        "rlpack/testing/local_ranks.py: self.submit(Call(role, method, [args] * self.num_ranks, {})).result()",
        "rlpack/testing/local_ranks.py: "
        "self.submit(Call(role, method, [(value, *args)] * self.num_ranks, {})).result()",
    },
    "the second argument is the timeout": {
        "recipes/driver/engine_slots.py: self._slots._changed.wait_for(lambda: self._slots._num_changes != self._seen, "
        "timeout_s)",
    },
    "a call to vLLM, which has its deadline from its start": {
        "rlpack/rollout/vllm/event_loop.py: self.start(coroutine, deadline, what).result()",
        "rlpack/rollout/vllm/weight_sender.py: call.result()",
    },
    "a run ends by the deadlines of its calls, or a user stops it": {"rlpack/cli/supervise.py: attempt.poll()"},
    "an evaluation ends by the deadlines of its calls": {"recipes/driver/ahead.py: self._session.evaluations.wait()"},
    "it stands in a block with a deadline, `asyncio.timeout`": {
        "rlpack/rollout/vllm/row_requests.py: self._may_ask.wait()",
    },
    "it runs on a rank, within a call that the driver ends at its deadline": {
        "rlpack/distributed/process.py: self._background.pop(call_id).result()",
        "rlpack/models/stage_link.py: dist.recv(tensor, group=group, group_src=stage)",
        "rlpack/models/piecewise_collectives.py: work.wait()",
        "rlpack/models/stage_link.py: work.wait()",
    },
    "requests that have deadlines, on a thread that runs until they end": {
        "rlpack/rewards/request_loop.py: asyncio.run_coroutine_threadsafe(call(loop.slots), loop.events).result()",
    },
    "the method of a pool, which has its own deadline": {
        "rlpack/rewards/scoring.py: self._pool.wait()",
        "rlpack/distributed/cluster.py: ranks.init_process_group(self._job, self._log_path)",
        "workers/reward.py: self._scorer.wait()",
    },
    "no wait: an accumulator, and a coroutine function of this name": {
        "rlpack/rewards/pool/pool_worker.py: wait()",
        "workers/optimizer_step.py: sums.result()",
    },
    "no wait: asyncio.wait has said that the task is done": {
        "rlpack/distributed/jobs/client.py: next_text.result()",
    },
    "no wait: the socket does not block, or select has said that it is readable": {
        "rlpack/rewards/pool/processes.py: self._control.recv(4096)",
        "rlpack/rewards/pool/processes.py: worker.channel.recv(_CHUNK_BYTES)",
        "rlpack/rewards/pool/supervisor.py: wake.recv(4096)",
        "rlpack/rewards/pool/supervisor.py: socket.recv_fds(self.control, COMMAND.size, 2)",
    },
    "no wait: waitid has said that the child has exited": {
        "rlpack/rewards/pool/supervisor.py: os.waitpid(pid, 0)",
    },
    "an idle worker or supervisor waits for the next call, until its pool closes the socket or kills it": {
        "rlpack/rewards/pool/protocol.py: sock.recv(min(count - len(received), 1 << 20))",
    },
    "copies in memory, which wait for nothing": {
        "rlpack/batch/copying.py: with ThreadPoolExecutor(threads)",
    },
    "reads of files, which take as long as the disk does": {
        "rlpack/checkpoint/files.py: with ThreadPoolExecutor(threads, thread_name_prefix='files')",
    },
    "it is the question of an `ask_ray`, which has a deadline": {
        "rlpack/distributed/rank_processes.py: ray.kill",
        "rlpack/distributed/pool_processes.py: ray.kill",
        "rlpack/distributed/pool_processes.py: remove_placement_group",
        "rlpack/distributed/ray_connection.py: ray.nodes",
        "rlpack/distributed/ray_internals.py: ray.nodes",
    },
    "`ended_at` ends the process at its deadline": {
        "rlpack/distributed/local_ray.py: ray.init",
        "rlpack/distributed/ray_connection.py: ray.init",
    },
    "it runs in a thread, which is left behind at a deadline": {
        "rlpack/checkpoint/background.py: save.result()",
        "rlpack/distributed/ray_connection.py: ray.shutdown",
    },
    "no wait: the socket has a time-out": {
        "rlpack/distributed/ray_watch.py: connection.recv(1)",
    },
    "a self-test that a person or `subprocess.run(timeout=...)` starts": {
        "rlpack/rewards/pool/sandbox.py: os.waitpid(child, 0)",
    },
}


def unbounded_waits(tree: ast.AST) -> Iterator[str]:
    """Yield the source of each call that may wait forever, and each function of ASKED outside of an `ask_ray`."""
    asked = {
        id(part)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and "ask_ray" in _names(call)
        for part in ast.walk(call)
    }
    for node in ast.walk(tree):
        if id(node) not in asked and isinstance(node, ast.Name | ast.Attribute) and ASKED & set(_names_of(node)):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and _is_unbounded(node):
            yield ast.unparse(node)
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            yield from (f"with {ast.unparse(call)}" for call in calls if CONTEXTS & set(_names(call)))


def _is_unbounded(call: ast.Call) -> bool:
    names = set(_names(call))
    text = ast.unparse(call)
    if names & WITH_A_FLAG.keys():
        return not any(flag in text for name, flag in WITH_A_FLAG.items() if name in names)
    if names & NEVER:
        return True
    has_deadline = any(
        (word.arg is None or "timeout" in word.arg or word.arg == "block")
        and not (isinstance(word.value, ast.Constant) and word.value.value is None)
        for word in call.keywords
    )
    if names & BY_KEYWORD:
        return not has_deadline
    if "select.select" in names:
        return len(call.args) < 4
    return bool(names & BY_ANY_ARGUMENT) and not call.args and not has_deadline and not names & NO_WAITS


def _names(call: ast.Call) -> Iterator[str]:
    """Yield `method` and `object.method` of a call."""
    yield from _names_of(call.func)


def _names_of(function: ast.expr) -> Iterator[str]:
    if isinstance(function, ast.Name):
        yield function.id
    elif isinstance(function, ast.Attribute):
        yield function.attr
        yield f"{ast.unparse(function.value).rpartition('.')[2]}.{function.attr}"


def found() -> list[str]:
    """Return the waits of the whole source that have no deadline, as `path: call`."""
    return [
        f"{path.relative_to(ROOT).as_posix()}: {wait}"
        for path in PATHS
        for wait in unbounded_waits(ast.parse(path.read_text(encoding="utf-8")))
    ]


def test_every_wait_in_the_source_has_a_deadline_or_a_reason():
    allowed = set().union(*BOUNDED.values())
    assert sorted(set(found()) - allowed) == [], "give it a timeout, or a reason in BOUNDED"
    assert len(PATHS) > 200


def test_every_reason_is_for_a_wait_that_exists():
    assert sorted(set().union(*BOUNDED.values()) - set(found())) == []


@pytest.mark.parametrize(
    "code",
    [
        *("ray.get(ref)", "ray.wait(refs, num_returns=2)", "ray.get(ref, timeout=None)", "self.future.result()"),
        *("thread.join()", "event.wait()", "queue.get()", "process.communicate()", "lock.acquire()", "pipe.recv()"),
        *(
            "connection.recv_bytes()",
            "os.waitpid(pid, 0)",
            "subprocess.run(['ls'])",
            "httpx.get(url)",
            "dist.barrier()",
        ),
        *("select.select([a], [], [])", "fcntl.flock(f, fcntl.LOCK_EX)", "socket.create_connection((host, port))"),
        *("with ThreadPoolExecutor(2) as pool: ...", "dist.init_process_group('gloo')", "asyncio.wait(tasks)"),
        *(
            "urllib.request.urlopen(url)",
            "ray.nodes()",
            "partial(ray.init, address='local')",
            "Thread(target=ray.shutdown)",
        ),
        *("remove_placement_group(group)", "free = ray._private.state.available_resources_per_node()"),
    ],
)
def test_a_wait_without_a_deadline_is_found(code):
    assert list(unbounded_waits(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        *("ray.get(ref, timeout=3)", "future.result(3)", "thread.join(timeout=left)", "event.wait(1)", "', '.join(a)"),
        *("os.path.join(a, b)", "queue.get(timeout=1)", "values.get('key')", "lock.acquire(timeout=1)"),
        *("os.waitpid(pid, os.WNOHANG)", "subprocess.run(['ls'], timeout=1)", "select.select([a], [], [], 1)"),
        *("ask_ray(ray.nodes)", "ask_ray(lambda: remove_placement_group(group), 3.0)"),
    ],
)
def test_a_wait_with_a_deadline_is_fine(code):
    assert not list(unbounded_waits(ast.parse(code)))
