"""Hostile functions against a real driver with secrets, in both sandboxes, as root and as an ordinary user."""

import ctypes
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rlpack.rewards.pool.remove_tree import remove_tree
from tests.unit.rewards.hostile_tools import SECRET

pytestmark = [
    pytest.mark.skipif(os.uname().sysname != "Linux", reason="the sandbox needs Linux"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the functions call the kernel by x86_64's numbers"),
]
REPOSITORY = Path(__file__).parents[4]
ORDINARY = 65534
# Four drivers run at once while other tests run: these bounds see a hang. On an idle machine, functions end by their
# deadline + 1 s, and a pool is complete again within 2 s.
SHORT_S, LONG_S, SLACK_S, REFILL_S = 0.5, 10.0, 5.0, 15.0
# function -> problem of its row, or its reward. Those that hang have a short deadline.
HANGS = (
    "becomes_another_program", "becomes_a_program_in_memory", "stops_itself", "blocks_every_signal", "stops_the_clock",
    "gives_a_number_that_hangs", "gives_an_object_that_hangs_when_deleted", "raises_what_cannot_be_printed",
    "replaces_json", "warns_for_ever", "announces_a_message_that_never_comes",
    "stops_the_collector", "hooks_the_collector",
)  # fmt: skip
ENDS = {
    "becomes_a_daemon": "error",
    "starts_the_command": "error",
    "faults": "killed",
    "aborts": "killed",
    "overflows_the_stack": "killed",
    "recurses": "error",
    "sets_an_alarm": "killed",
    "fills_its_directory": "error",
    "starts_many_threads": "error",
    "maps_all_memory": "error",
    "gives_a_huge_text": "invalid",
    "gives_a_huge_number": "infinite",
    "gives_an_endless_generator": "invalid",
    "gives_a_nested_list": "invalid",
    "gives_a_number_that_exits": "error",
    "gives_an_object_that_runs_code": "invalid",
    "raises_a_group_of_exits": "error",
    "replaces_the_protocol": "killed",
    "floods_the_pool": 1.0,  # a function may choose its reward
    "refuses_every_audit_event": 0.0,
    "claims_to_be_done": "killed",
    "fills_its_directory_with_many_files": "killed",
    "fills_the_disk_with_deleted_files": "killed",
    "fills_the_disk_with_deleted_files_that_are_only_mapped": "killed",
    "hides_files_in_a_closed_directory": "killed",
    "makes_a_million_files": "killed",
    "dumps_its_core": "killed",
    "sleeps_as_it_exits": "error",
    "recurses_in_c": "error",
    "changes_what_the_next_call_sees": "killed",
}
REFUSED = (
    "reads_every_environment", "reads_every_environment_by_thread", "reads_every_command_line", "opens_every_memory",
    "opens_every_map", "follows_every_link", "lists_every_descriptor", "opens_descriptors_of_its_parents",
    "traces_its_parents", "reads_the_memory_of_its_parents", "takes_descriptors_of_its_parents", "signals_everyone",
    "signals_by_a_socket", "limits_its_parents", "slows_its_parents", "reads_credentials",
    "reads_credentials_that_are_new", "reads_the_run_directory", "changes_the_run_directory", "links_to_a_secret",
    "opens_a_secret_by_its_handle", "reads_shared_memory", "connects_to_a_local_socket", "opens_other_kinds_of_sockets",
    "opens_a_disk", "has_privileges", "changes_kernel_settings", "leaves_its_namespaces", "asks_the_kernel",
    "raises_its_limits", "changes_files_outside", "nests_directories", "opens_many_files", "removes_its_directory",
    "shares_memory_with_others", "spares_itself_when_memory_runs_out", "changes_what_is_installed",
    "locks_and_flags_files_outside", "hangs_at_exit", "forgets_every_module", "replaces_standard_output",
    "stops_reading", "fills_memory_with_files", "writes_to_other_folders", "moves_files_out",
    "connects_to_the_ports_of_this_machine", "connects_to_every_local_socket", "forks_with_sessions",
    "leaves_threads_that_ignore_it", "prints_a_gigabyte", "watches_every_folder", "reads_the_mounts_and_its_memory",
    "makes_itself_important", "locks_memory",
)  # fmt: skip
# Those that may hang after they returned have a short deadline, too.
SHORT = (*HANGS, "refuses_every_audit_event", "replaces_standard_output", "forgets_every_module", "hangs_at_exit")
OUTCOMES = dict.fromkeys(HANGS, "timeout") | ENDS | dict.fromkeys(REFUSED, 0.0)


def become_ordinary() -> None:
    """Become another user, who can reach the interpreter even if it is in root's home."""
    libc = ctypes.CDLL(None, use_errno=True)
    executable = Path(sys.base_prefix).resolve()
    closed = [path for path in reversed(executable.parents) if not path.stat().st_mode & stat.S_IXOTH]
    if closed:
        private, bind = 0x44000, 0x5000
        assert libc.unshare(0x20000) == 0
        assert libc.mount(None, b"/", None, private, None) == 0
        kept = os.open(executable, os.O_PATH)
        assert libc.mount(b"none", bytes(closed[0]), b"tmpfs", 0, b"mode=755") == 0
        executable.mkdir(parents=True)
        assert libc.mount(f"/proc/self/fd/{kept}".encode(), bytes(executable), None, bind, None) == 0
    os.setgroups([])
    os.setresgid(ORDINARY, ORDINARY, ORDINARY)
    os.setresuid(ORDINARY, ORDINARY, ORDINARY)


@pytest.fixture(scope="module")
def drivers() -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """Start a driver for each sandbox and user, all at once: most of their time is spent waiting."""
    users = ("ordinary", "root") if os.geteuid() == 0 else ("ordinary",)
    with ExitStack() as stack:
        yield {
            (sandbox, user): stack.enter_context(started_driver(sandbox, user))
            for sandbox in ("limits", "strict")
            for user in users
        }


@contextmanager
def started_driver(sandbox: str, user: str) -> Iterator[subprocess.Popen[str]]:
    folder = Path(tempfile.mkdtemp(prefix="rlpack-test-"))  # pytest's are closed to other users
    folder.chmod(0o755)
    becomes_ordinary = user == "ordinary" and os.geteuid() == 0
    for path in (folder / "home", folder / "tmp"):
        path.mkdir()
        if becomes_ordinary:
            os.chown(path, ORDINARY, ORDINARY)
    functions = {"short": SHORT, "long": [name for name in OUTCOMES if name not in SHORT]}
    specification = {"strict": sandbox == "strict", "functions": functions, "short_s": SHORT_S, "long_s": LONG_S}
    command = [sys.executable, "-m", "tests.unit.rewards.pool.driver", json.dumps(specification), SECRET]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    environment |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "WANDB_API_KEY": SECRET}
    driver = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=become_ordinary if becomes_ordinary else None,
        cwd=REPOSITORY,
    )
    try:
        yield driver
    finally:
        driver.kill()
        driver.communicate()
        remove_tree(folder)


@pytest.mark.parametrize("sandbox", ["limits", "strict"])
@pytest.mark.parametrize("user", ["root", "ordinary"])
def test_hostile_functions_get_nothing_and_end_by_their_deadlines(sandbox: str, user: str, drivers):
    if (sandbox, user) not in drivers:
        pytest.skip("needs root")
    output, errors = drivers[sandbox, user].communicate(timeout=120)
    assert drivers[sandbox, user].returncode == 0, errors[-4000:]
    outcomes = json.loads(output)
    found = {name: result["problem"] or result["value"] for name, result in outcomes.items()}
    assert found == OUTCOMES, {name: outcomes[name]["detail"] for name in found if found[name] != OUTCOMES[name]}
    leaks = [name for name, result in outcomes.items() if SECRET in result["detail"] or "Breach" in result["detail"]]
    assert leaks == []
    deadlines = {name: SHORT_S if name in SHORT else LONG_S for name in OUTCOMES}
    late = {name: result for name, result in outcomes.items() if result["took_s"] > deadlines[name] + SLACK_S}
    assert late == {}
    assert {name: result for name, result in outcomes.items() if result["refill_s"] > REFILL_S} == {}
