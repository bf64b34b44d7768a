import pytest

from rlpack.config.compose import compose
from rlpack.config.rules import broken_rules
from rlpack.config.sections.submission import Submission, submission_problems
from tests.builders import tiny_config
from tests.unit.config.problems import problems


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "WANDB_API_KEY", "MY_TOKEN", "DB_PASSWORD", "AWS_SECRET_ACCESS_KEY"),
        *("OPENAI_KEY", "wandb_key", "GITHUB_PAT", "DB_PWD"),
    ],
)
def test_a_secret_in_a_jobs_environment_is_refused_with_the_key_for_its_name(name):
    (problem,) = submission_problems(Submission(env_vars={name: "abc"}))
    assert f"job.env_vars.{name} looks like a secret" in problem
    assert f"set job.secret_names=[{name}]" in problem
    assert "abc" not in problem


@pytest.mark.parametrize("name", ["HTTPS_PROXY", "PIP_INDEX_URL"])
def test_a_url_with_a_password_in_a_jobs_environment_is_refused(name):
    (problem,) = broken_rules(tiny_config(job=Submission(env_vars={name: "https://me:hunter2@host:3128/simple"})))
    assert f"job.env_vars.{name} looks like a secret" in problem
    assert "hunter2" not in problem


def test_what_is_no_secret_is_the_jobs_environment():
    names = {
        "NCCL_DEBUG": "INFO",
        "HF_HUB_OFFLINE": "1",
        "MONKEY": "1",
        "DATA_PATH": "/data",
        "PWD": "/",
        "SSH_KEY": "",
    }
    job = Submission(env_vars=names | {"HTTPS_PROXY": "http://proxy:3128"})
    assert broken_rules(tiny_config(job=job)) == []


def test_whole_numbers_of_a_jobs_environment_are_text():
    words = ("job.env_vars.OMP_NUM_THREADS=4", "job.env_vars.OFFSET=-1", "job.env_vars.DEBUG='0'")
    assert compose(words).job.env_vars == {"OMP_NUM_THREADS": "4", "OFFSET": "-1", "DEBUG": "0"}
    assert problems("job.env_vars.DEBUG=true") == [
        "job.env_vars.DEBUG is True; it has to be text; put it in quotes, in a shell as 'job.env_vars.DEBUG=\"…\"'"
    ]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Submission(secret_names=("A-B",)), "job.secret_names holds 'A-B'"),
        (Submission(secret_names=("../etc/passwd",)), "job.secret_names holds '../etc/passwd'"),
        (Submission(env_vars={"A=B": "c"}), "job.env_vars holds 'A=B'"),
        (Submission(env_vars={"PYTHONPATH": "/x"}), "put yours there"),
        (Submission(env_vars={"RAY_JOB_STOP_WAIT_TIME_S": "3"}), "set job.stop_timeout_s instead"),
        (
            Submission(env_vars={"COLOUR": "red"}, secret_names=("COLOUR",)),
            "is in both job.env_vars and job.secret_names; remove it from one",
        ),
        (
            Submission(pip=("numpy", "git+https://me:abc@host/package.git@v1")),
            "job.pip.1 is a URL with a password or token, and Ray shows",
        ),
        (Submission(env_vars={"INDEX": "https://abc@host/simple"}), "job.env_vars.INDEX looks like a secret"),
        (Submission(working_dir=" "), "job.working_dir is blank"),
        (Submission(secrets_dir=""), "job.secrets_dir is blank"),
    ],
)
def test_what_no_job_can_have_is_a_broken_rule(job, message):
    (problem,) = broken_rules(tiny_config(job=job))
    assert message in problem
