"""The error of a contract check."""


class ContractError(AssertionError):
    """A role breaks a contract.

    Attributes:
        contract: its name, listed in `rlpack.testing.contracts` and `rlpack.testing.on_ray`.
        problem: the symptom.
        remedy: the fix; "" if the problem says it.
    """

    def __init__(self, contract: str, problem: str, remedy: str) -> None:
        super().__init__(contract, problem, remedy)
        self.contract, self.problem, self.remedy = contract, problem, remedy

    def __str__(self) -> str:
        """Return one line: contract, problem and remedy."""
        return f"{self.contract}: {self.problem}{'; ' if self.remedy else ''}{self.remedy}"
