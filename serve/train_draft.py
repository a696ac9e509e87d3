"""``jaxinfer train-draft``: trains a draft head by a recipe and says how well it drafts."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxinfer.config_values import ConfigError
from jaxinfer.draft_training import train_draft as train
from jaxinfer.progress import parts_bar
from jaxinfer.speculative.heads.head import METHODS
from jaxinfer.speculative.training.config import TrainConfig
from jaxinfer.speculative.training.run import TrainedHead


def train_draft(method: str, path: Path, output: str | None) -> None:
    """Runs a recipe to the end, or goes on with a run that was stopped, and prints what came out.

    Raises:
        ConfigError: the method is unknown, or what ``train`` says.
    """
    chosen = next((known for known in METHODS if known == method), None)
    if chosen is None:
        raise ConfigError(f"--method is {method!r}; allowed: {', '.join(METHODS)}")
    recipe = TrainConfig.load(path)
    if output is not None:
        recipe = recipe.model_copy(update={"output": recipe.output.model_copy(update={"directory": output})})
    with parts_bar() as report:
        trained = train(chosen, recipe, report)
    Console().print(_table(trained))
    Console().print(f"head: {trained.directory}", soft_wrap=True)


def _table(trained: TrainedHead) -> Table:
    drafts = range(1, len(trained.after.per_position) + 1)
    table = Table("held-out text", *(f"draft {i}" for i in drafts), "tokens per pass")
    for name, measured in (("before", trained.before), ("after", trained.after)):
        shares = (f"{share:.1%}" for share in measured.per_position)
        table.add_row(name, *shares, f"{measured.mean_length:.2f}")
    return table
