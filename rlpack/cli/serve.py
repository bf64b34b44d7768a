"""`rlpack serve`: vLLM's OpenAI-compatible server for a model or a run, with a token."""

import os

from rlpack.cli.error_text import print_error
from rlpack.cli.quiet_console import hide_progress_bars
from rlpack.cli.serve_request import parser, serve_request
from rlpack.config.errors import ConfigError
from rlpack.models.errors import ModelError
from rlpack.rollout.errors import EngineError


def serve(arguments: list[str]) -> int:
    """Serve the model that the command line names until a signal ends it, and return the exit code."""
    parsed, words = parser().parse_known_args(arguments)
    hide_progress_bars()
    try:
        request = serve_request(parsed, words, os.environ)
        from rlpack.cli.serve_model import serve_model  # transformers takes seconds

        return serve_model(request)
    except (ConfigError, EngineError, ModelError) as error:
        print_error("serve", str(error))
        return 2
