"""What the plugin uses of SGLang, as one table, and two looks at it: at the source, and at the loaded modules.

SGLang only logs a hook whose target it does not find, and serves on without it. So `hsx serve` reads the installed package's
source before it starts the server (nothing is imported: a look takes a fraction of a second), and the plugin looks at the
loaded modules before it registers its hooks; either names the hook and what is missing of it. Standard library only.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
LOGITS: Final = "sglang.srt.layers.logits_processor.LogitsProcessor"
BATCH: Final = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
MODE: Final = "sglang.srt.model_executor.forward_batch_info.ForwardMode"
REGISTRY: Final = "sglang.srt.plugins.hook_registry.HookRegistry"
_MAX_HOPS: Final = 4
"""Re-exports and base classes followed from one name."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something of SGLang that the plugin relies on.

    Attributes:
        hook: name of the hook that needs it, for messages.
        path: dotted path of a function, method or class.
        parameters: leading parameters that a function must have, in this order.
        attributes: names that a class must have: fields, methods, or attributes that its methods set.
        fields_in: a package whose classes' fields may make up the class, where there is one.
    """

    hook: str
    path: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    fields_in: str = ""


TARGETS: Final = (
    Target("plugin", f"{REGISTRY}.register", ("cls", "target", "hook", "hook_type")),
    Target("plugin", "sglang.srt.plugins.hook_registry.HookType", attributes=("BEFORE", "AFTER", "AROUND")),
    Target("ModelRunner.load_model", f"{RUNNER}.load_model", ("self",)),
    Target("ModelRunner.load_model", RUNNER, attributes=("is_draft_worker", "server_args", "model_config", "model")),
    Target(
        "ModelRunner.load_model",
        "sglang.srt.server_args.ServerArgs",
        attributes=("pp_size", "dp_size", "tp_size", "nnodes", "node_rank"),
        fields_in="sglang.srt.arg_groups.fields",  # since 0.5.20
    ),
    Target(
        "ModelRunner.load_model",
        "sglang.srt.configs.model_config.ModelConfig",
        attributes=("num_hidden_layers", "hidden_size", "vocab_size", "dtype"),
    ),
    Target("ModelRunner.load_model", "sglang.srt.distributed.parallel_state.get_attn_tensor_model_parallel_rank"),
    Target("ModelRunner.load_model", "sglang.srt.distributed.parallel_state.get_attn_tensor_model_parallel_world_size"),
    Target("ModelRunner.forward", f"{RUNNER}.forward", ("self", "forward_batch")),
    Target(
        "ModelRunner.forward",
        BATCH,
        attributes=(
            "forward_mode",
            "rids",
            "extend_prefix_lens_cpu",
            "extend_seq_lens_cpu",
            "input_ids",
            "input_embeds",
            "mm_inputs",
        ),
    ),
    Target("ModelRunner.forward", MODE, attributes=("EXTEND", "MIXED")),
    Target(
        "LogitsProcessor.forward",
        f"{LOGITS}.forward",
        ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states", "hidden_states_before_norm"),
    ),
)
"""Each is looked up in every version that is installed or read; see docs/compatibility.md."""


def missing_in_source(package: Path) -> list[str]:
    """Sentences that say what of `TARGETS` is not in the source; empty where all of it is.

    Args:
        package: the folder `sglang` of an installation or of an unpacked wheel.
    """
    source = _Source(package)
    found = []
    for target in TARGETS:
        try:
            node = source.find(target.path)
            names = source.attributes(target.path) if target.attributes else set()
            found += _judge(target, _parameters(node), names | source.fields_of(target.fields_in))
        except LookupError as error:
            found.append(f"hook {target.hook}: {error.args[0]}")
    return found


def missing_at_run_time() -> list[str]:
    """As `missing_in_source`, of the modules that this process has or can import. Instance attributes are not looked at."""
    found = []
    for target in TARGETS:
        try:
            thing = pkgutil.resolve_name(target.path)
        except (ImportError, AttributeError, ValueError) as error:
            found.append(f"hook {target.hook}: {target.path} is not there ({error})")
            continue
        parameters = None
        if target.parameters:
            wanted = inspect.signature(thing)
            parameters = [*(["cls"] if inspect.ismethod(thing) else []), *wanted.parameters]
        names = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        # What methods set on an instance cannot be seen on the class; for those the source is the witness.
        checked = dataclasses.is_dataclass(thing) or hasattr(thing, "__members__")
        attributes = {*names, *dir(thing)} if checked else set(target.attributes)
        found += _judge(target, parameters, attributes)
    return found


def _judge(target: Target, parameters: list[str] | None, attributes: set[str]) -> list[str]:
    found = []
    if target.parameters:
        if parameters is None:
            found.append(f"hook {target.hook}: {target.path} is no function")
        elif tuple(parameters[: len(target.parameters)]) != target.parameters:
            found.append(
                f"hook {target.hook}: {target.path} takes ({', '.join(parameters)}); "
                f"expected it to begin with ({', '.join(target.parameters)})"
            )
    lacking = [name for name in target.attributes if name not in attributes]
    if lacking:
        found.append(f"hook {target.hook}: {target.path} has no {', '.join(lacking)}")
    return found


class _Source:
    """Finds definitions in a package's source by their dotted paths."""

    def __init__(self, package: Path) -> None:
        self._root = package.parent
        self._trees: dict[Path, ast.Module] = {}

    def find(self, path: str, hops: int = _MAX_HOPS) -> ast.stmt:
        """The definition at `path`. Raises LookupError with a sentence where there is none."""
        module, rest = self._module(path)
        body: list[ast.stmt] = self._tree(module).body
        node: ast.stmt | None = None
        for position, name in enumerate(rest):
            node = _defined(body, name)
            if node is None:
                elsewhere = self._imported(module, name) if position == 0 else None
                if elsewhere is None or hops == 0:
                    raise LookupError(f"{path} is not there")
                return self.find(".".join([elsewhere, *rest[1:]]), hops - 1)
            body = node.body if isinstance(node, ast.ClassDef) else []
        if node is None:
            raise LookupError(f"{path} is a module; expected something in it")
        return node

    def attributes(self, path: str, hops: int = _MAX_HOPS) -> set[str]:
        """Names that instances of the class at `path` have, its bases' included as far as they can be found."""
        node = self.find(path)
        if not isinstance(node, ast.ClassDef):
            raise LookupError(f"{path} is no class")
        names: set[str] = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(inner.name)
            elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and isinstance(inner.value, ast.Name):
                names |= {inner.attr} if inner.value.id == "self" else set()
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                names.add(statement.target.id)
            elif isinstance(statement, ast.Assign):
                names |= {goal.id for goal in statement.targets if isinstance(goal, ast.Name)}
        module = path.rpartition(".")[0]
        for base in node.bases if hops else []:
            if isinstance(base, ast.Name):
                try:
                    names |= self.attributes(f"{module}.{base.id}", hops - 1)
                except LookupError:  # a base outside the package
                    continue
        return names

    def fields_of(self, package: str) -> set[str]:
        """Fields of all classes in the modules of `package`; none where there is no such package."""
        folder = self._root.joinpath(*package.split("."))
        files = sorted(folder.glob("*.py")) if package else []
        classes = [node for file in files for node in self._tree(file).body if isinstance(node, ast.ClassDef)]
        fields = [inner for node in classes for inner in node.body if isinstance(inner, ast.AnnAssign)]
        return {field.target.id for field in fields if isinstance(field.target, ast.Name)}

    def _module(self, path: str) -> tuple[Path, list[str]]:
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            folder = self._root.joinpath(*parts[:count])
            for file in (folder.with_suffix(".py"), folder / "__init__.py"):
                if file.is_file():
                    return file, parts[count:]
        raise LookupError(f"{path} is not there")

    def _tree(self, file: Path) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(file.read_text(encoding="utf-8"))
        return self._trees[file]

    def _imported(self, file: Path, name: str) -> str | None:
        for node in ast.walk(self._tree(file)):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return f"{node.module}.{alias.name}"
        return None


def _defined(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return node
        # A definition may stand under a condition (a platform, a version).
        for inner in (getattr(node, "body", []), getattr(node, "orelse", [])) if isinstance(node, ast.If | ast.Try) else ():
            found = _defined(inner, name)
            if found is not None:
                return found
    return None


def _parameters(node: ast.stmt) -> list[str] | None:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
