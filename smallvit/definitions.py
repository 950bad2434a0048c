"""The code behind each name of a recipe file, as a hash. If it has changed, runs that use this code are trained again."""

import ast
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

Code = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
BUILTINS = ("classmethod", "property", "staticmethod")  # decorators that are known without an import
CHANGING = ("pop", "popitem", "setdefault")  # methods that return a value and also change their object


def definitions(text: str) -> dict[str, str]:
    """Return a dict from each top-level name in a recipe file, such as a function, to a hash of its code. `text` is the source
    code of the file. The hash also covers all other code in the file that this code uses, so it changes with that code.

    Code that changes an object counts as code of its name: `TABLE["key"] = 1`, `fill(TABLE)`, a decorator that enters a
    function into TABLE, or a change under another name of the same object. Comments, docstrings and unrelated parts of the file
    do not change a hash. A changed hash means that arms which use the name are trained again.

    Not seen: a change through an object that contains the other one, an imported object that a decorator changes, and code that
    is built while it runs, such as `exec`.
    """
    nodes = [without_docstrings(node) for node in ast.parse(text).body]
    star = [index for index, node in enumerate(nodes) if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
    positions: dict[str, list[int]] = {}
    for index, names in enumerate(changed_names(nodes)):
        for name in names:
            positions.setdefault(name, []).append(index)

    def used_by(name: str) -> list[ast.stmt]:
        todo, found = [*positions[name], *star], set()
        while todo:
            found.add(index := todo.pop())
            todo += [other for name in names_in(nodes[index]) for other in positions.get(name, ()) if other not in found]
        return [nodes[index] for index in sorted(found)]

    return {name: hashlib.sha256("".join(map(dump, used_by(name))).encode()).hexdigest()[:16] for name in positions}


def dump(tree: ast.AST) -> str:
    """Return a syntax tree as text, the same in all versions of Python: version 3.12 adds the lists of type parameters, and
    version 3.13 leaves out empty lists.
    """
    text = ast.dump(tree, **({"show_empty": True} if sys.version_info >= (3, 13) else {}))
    return text.replace(", type_params=[]", "")


def without_docstrings(tree: ast.stmt) -> ast.stmt:
    """Remove the docstrings of all classes and functions in a syntax tree (from Python's `ast`), and return this tree."""
    for node in ast.walk(tree):
        if isinstance(node, Code) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def names_in(node: ast.AST) -> set[str]:
    """Return the set of all variable names in a syntax tree."""
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def changed_names(nodes: Sequence[ast.stmt]) -> list[set[str]]:
    """Return the set of names that each of the top-level statements of a file (`nodes`) defines or changes, itself or by the
    functions of the file that it calls. An object with several names is changed under all of them.
    """
    assigned = [assigned_names(node) for node in nodes]
    imports = [isinstance(node, ast.Import | ast.ImportFrom) for node in nodes]
    imported = {*BUILTINS}.union(*(names for names, is_import in zip(assigned, imports) if is_import))
    own = set().union(*(names for names, is_import in zip(assigned, imports) if not is_import))
    shown_changes = partial(changes_of, libraries=imported - own)
    effects, others = names_changed_by_calls(nodes, set().union(*assigned), shown_changes), other_names(nodes)
    found = []
    for node, names in zip(nodes, assigned):
        parts = [*run_on_import(node)]
        called = set().union(*map(called_names, parts))
        changed = set().union(*map(shown_changes, parts), *(effects.get(name, ()) for name in called))
        todo = [*changed]
        while todo:
            todo += (more := others.get(todo.pop(), set()) - changed)
            changed |= more
        found.append(names | changed)
    return found


def assigned_names(node: ast.AST) -> set[str]:
    """Return the set of names that a top-level statement of a Python file defines, imports or assigns."""
    if isinstance(node, Code):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    if isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return set()  # names inside are local
    return set().union(*map(assigned_names, ast.iter_child_nodes(node)))


def changes_of(node: ast.AST, libraries: set[str]) -> set[str]:
    """Return the set of names of the objects that one node of a syntax tree changes: by an assignment to a part of them, by
    a statement that is an expression (but `print`), by a decorator, or by a method such as `pop`. The nodes below it are not
    looked at. A decorator changes none of the names in `libraries`, such as `dataclass` or `torch`.
    """
    if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        return {first_name(node)} - {""}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
        return {first_name(node.func)} - {""}
    if isinstance(node, ast.Expr):
        prints = isinstance(node.value, ast.Call) and first_name(node.value.func) == "print"
        return set() if prints else names_in(node)
    if isinstance(node, Code):
        return set().union(*map(names_in, node.decorator_list)) - libraries
    if isinstance(node, ast.AugAssign):
        return {first_name(node.target)} - {""}
    return set(node.names) if isinstance(node, ast.Global) else set()


def names_changed_by_calls(nodes: Sequence[ast.stmt], known: set[str], shown_changes: Callable) -> dict[str, set[str]]:
    """Return which of the top-level names of a file (`known`) each of its functions and classes changes when it is called, also
    through others that it uses, as a dict from its name. `nodes` are the top-level statements, and `shown_changes(node)` are
    the names that one node of a syntax tree changes.
    """
    code = {node.name: node for node in nodes if isinstance(node, Code)}
    effects = {name: known & set().union(*map(shown_changes, ast.walk(node))) for name, node in code.items()}
    uses = {name: code.keys() & names_in(node) for name, node in code.items()}
    for _ in code:  # as often as the longest chain of functions that use each other
        effects = {name: names.union(*(effects[other] for other in uses[name])) for name, names in effects.items()}
    return effects


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a top-level statement that run when the file is imported: all but the bodies of functions."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        parts = [*getattr(node, "decorator_list", ()), node.args]
    else:
        parts = [*ast.iter_child_nodes(node)]
    for part in parts:
        yield from run_on_import(part)


def called_names(node: ast.AST) -> set[str]:
    """Return the set of names of the functions and classes that one node of a syntax tree calls: as a call, as a decorator, or
    as the base of a class.
    """
    called = [node.func] if isinstance(node, ast.Call) else []
    called += node.decorator_list if isinstance(node, Code) else []
    called += node.bases if isinstance(node, ast.ClassDef) else []
    return set(map(first_name, called))


def other_names(nodes: Sequence[ast.stmt]) -> dict[str, set[str]]:
    """Return for each top-level name of a file the other names of the same object, or of an object that contains it, such as
    TABLE for `rows` after `rows = TABLE["rows"]`. `nodes` are the top-level statements.
    """
    found: dict[str, set[str]] = {}
    for node in (part for statement in nodes for part in run_on_import(statement)):
        if isinstance(node, ast.For):
            targets, sources = [node.target], names_in(node.iter)
        elif isinstance(node, ast.Assign):
            targets, sources = node.targets, {first_name(node.value)}
            sources |= set().union(*map(names_in, targets)) if len(targets) > 1 else set()  # one = other = {}
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets, sources = [node.target], {first_name(node.value)}
        else:
            continue
        for name in set().union(*map(names_in, targets)):
            found.setdefault(name, set()).update(sources - {name, ""})
    return found


def first_name(node: ast.AST | None) -> str:
    """Return the name at the beginning of an expression such as `table["key"].field`, or an empty text if there is none."""
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""
