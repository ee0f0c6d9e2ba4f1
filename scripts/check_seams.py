"""Fails if a module of the launcher or the agent uses an underscore attribute that it has not defined itself.

``check_seams.py [ROOT]`` reads ``elastic_launch`` and ``agents/elastic_agents`` below a root, this repository unless
given. ``x._name`` and ``getattr(x, "_name")`` are allowed where ``x`` is ``self`` or ``cls``, or a class of the same
module has the attribute: what is changed together is in one module. ``FOREIGN`` has what is used of other packages
although they keep it private, since they have no other way.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = "elastic_launch", "agents/elastic_agents"

FOREIGN = {
    "named tuples, whose methods have an underscore so that no field has their name": "_fields _make _replace",
    "a process that ends without cleanup, or does a part of it itself": "_exit _run_exitfuncs _shutdown",
    "the frame that calls a function": "_getframe",
    "running a script as Python itself does": "_run_module_as_main",
    "taking part in multiprocessing's start of a process": "_bootstrap _fd _inheriting _resource_tracker",
    "the environment: its type, and the dict behind it": "_Environ _data",
    "NumPy's own generator, behind its global functions": "_rand",
    "fsspec's directory of a path": "_parent",
    "what fetches in a process of torch's loaders": "_IterableDatasetFetcher _MapDatasetFetcher",
    "how torch was told to log and to meet, of its objects": "_local_ranks_filter _redirects _registry _tee",
    "what fully_shard has made, of torch's objects": "_all_gather_comm _fsdp_param_group _fsdp_param_groups "
    "_get_fsdp_state _init_sharded_param _init_sharded_post_forward_param_metadata _is_root _local_tensor "
    "_fsdp_orig_uid _orig_param_uid _orig_size _pg_registry _setattr_on_modules _sharded_local_tensor _spec "
    "_unsharded_param",
    "torch's logging in C++": "_ZN3c1011initLoggingEv",
    "whether CUDA was initialised before a fork": "_is_in_bad_fork",
    "whether a tensor was changed in place": "_version",
    "how many tensors share memory": "_cdata _storage_Use_Count",
    "what a sparse tensor has": "_nnz",
    "operations on many tensors at once": (
        "_foreach_add_ _foreach_copy_ _foreach_div_ _foreach_mul_ _foreach_sub _foreach_zero_"
    ),
    "the tensors of one module, by name, and which are not saved": "_buffers _non_persistent_buffers_set _parameters",
    "a state dict's versions of modules": "_metadata",
    "the hooks of a module, and its compiled call": "_compiled_call_impl _forward_hooks _forward_pre_hooks",
    "the hooks of a backward pass": "_backward_hooks _backward_pre_hooks _post_accumulate_grad_hooks",
    "a gradient scaler: its tensors, what it has unscaled, whether it asks an optimizer to skip its step itself": (
        "_device _growth_tracker _per_optimizer_states _scale _step_supports_amp_scaling"
    ),
    "by what a multiplication has multiplied, which its backward pass needs": "_saved_other",
    "by which names a mesh finds its groups, and whose rank it has": "_dim_group_names _rank _root_mesh",
    "what meshes are told apart by, and what torch has kept about them": "_clear_sharding_prop_cache _hash _thread_id",
    "all process groups, and what they consist of": "_device_types _get_backend _world",
    "how many collectives a group has begun": "_get_sequence_number_for_group",
    "what a work does": "_get_op_type",
    "aborting process groups": "_abort_process_group _end_coalescing _group_end _group_start _start_coalescing",
    "a store in this process": "_C _distributed_c10d",
    "DeepSpeed's parts of a parameter": "_dp_group _hp_mapping",
}
"""Attributes of other packages' objects, by what they are used for."""


def own_names(tree: ast.AST) -> set[str]:
    """Return the names of the attributes and methods of the classes that a module defines."""
    names: set[str] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        names |= {node.id for statement in kind.body for node in ast.walk(statement) if _is_stored(node)}
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node.value):
                names.add(node.attr)
    return names


def accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of each underscore attribute that is read or set, unless it is that of ``self``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=value, attr=name):
                pass
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[value, ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        if name.startswith("_") and not name.startswith("__") and not _is_own(value):
            yield value.lineno, name


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def main(root: Path) -> int:
    """Print each access to what another module keeps for itself; return the exit code."""
    foreign, refused = set(" ".join(FOREIGN.values()).split()), False
    for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
        tree = ast.parse(path.read_bytes(), str(path))
        for line, name in accesses(tree):
            if name not in foreign | own_names(tree):
                refused = True
                where = f"{path.relative_to(root)}:{line}"
                print(f"{where}: {name} belongs to another module; give that a public function.", file=sys.stderr)
    return int(refused)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
