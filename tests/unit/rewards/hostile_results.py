"""Hostile functions whose results or errors hang, exit or run code when they are looked at."""

import os
import time


def gives_a_huge_text(files):
    return "x" * (50 << 20)


def gives_a_huge_number(files):
    return 10**100_000


def gives_an_endless_generator(files):
    return iter(int, 1)


def gives_a_nested_list(files):
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    return nested


class SlowFloat(float):
    def __float__(self):
        time.sleep(60)


def gives_a_number_that_hangs(files):
    return SlowFloat(1.0)


class LyingFloat(float):
    def __float__(self):
        raise SystemExit(0)


def gives_a_number_that_exits(files):
    return LyingFloat(1.0)


class Reduced:
    def __reduce__(self):
        return os.system, ("true",)

    def __eq__(self, other):
        os._exit(0)

    def __hash__(self):
        os._exit(0)

    def __repr__(self):
        os._exit(0)


def gives_an_object_that_runs_code(files):
    return Reduced()


class SlowDelete:
    def __del__(self):
        time.sleep(60)


def gives_an_object_that_hangs_when_deleted(files):
    return SlowDelete()


class SlowText(Exception):  # noqa: N818
    def __str__(self):
        time.sleep(60)
        return ""


def raises_what_cannot_be_printed(files):
    raise SlowText


class Exit(BaseException):
    pass


def raises_a_group_of_exits(files):
    raise BaseExceptionGroup("x" * (10 << 20), [SystemExit(0), KeyboardInterrupt(), GeneratorExit(), Exit()])
