"""The mutants of a Python file by its syntax tree: one change of an operator, comparison, constant, slice or call each.

Docstrings, annotations, strings, imports, assertions and raise statements are left alone.
"""

from __future__ import annotations

import ast
import bisect
import collections
import dataclasses
import hashlib
import io
import itertools
import tokenize
import warnings

ARITHMETIC = {"Add": ("+", "-"), "Sub": ("-", "+"), "Mult": ("*", "/"), "Div": ("/", "*"), "FloorDiv": ("//", "*")}
BITS = {"BitAnd": ("&", "|"), "BitOr": ("|", "&"), "And": ("and", "or"), "Or": ("or", "and")}
COMPARISONS = {
    **{"Lt": ("<", "<="), "LtE": ("<=", "<"), "Gt": (">", ">="), "GtE": (">=", ">"), "Eq": ("==", "!=")},
    **{"NotEq": ("!=", "=="), "Is": ("is", "is not"), "IsNot": ("is not", "is"), "In": ("in", "not in")},
    "NotIn": ("not in", "in"),
}
UNARY = {"USub": "minus", "Invert": "~", "Not": "not"}
PAIRS = [("min", "max"), ("minimum", "maximum"), ("any", "all"), ("argmin", "argmax"), ("sum", "mean")]
PAIRS += [("exp", "expm1"), ("zeros", "ones"), ("zeros_like", "ones_like")]
RENAMED = {**dict(PAIRS), **{b: a for a, b in PAIRS}}
TIGHT = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List, ast.Constant)
TINY = 1e-4  # twice such a number is lost in float32: it becomes 0


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one file. `line` counts from 1, `column` from 0, `unit` holds the lines of the top-level statement.

    `called`: the unit is a function, so that tests which never call it cannot see the change.
    """

    file: str
    line: int
    column: int
    operator: str
    function: str
    original: str
    mutated: str
    source: str = dataclasses.field(repr=False)
    unit: tuple[int, int]
    called: bool
    digest: str

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.column}:{self.operator}:{self.digest}"

    @property
    def key(self) -> str:
        """The id with the line counted from the unit's first: it outlives a change elsewhere in the file."""
        return f"{self.file}:{self.function}+{self.line - self.unit[0]}:{self.column}:{self.operator}:{self.digest}"

    def within(self, place: tuple[str, int]) -> bool:
        """Whether code that starts at this file and line, and is called, may be the mutant's."""
        return place[0] == self.file and (not self.called or self.unit[0] <= place[1] <= self.unit[1])


class Maker(ast.NodeVisitor):
    """Collects (place, span, new text, operator, function, top-level statement) over a module; offsets in bytes."""

    def __init__(self, source: str):
        self.data, lines = source.encode(), source.encode().split(b"\n")
        self.starts = [0, *itertools.accumulate(len(line) + 1 for line in lines)]
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self.words = [
            (self.starts[row - 1] + len(lines[row - 1].decode()[:column].encode()), token.string)
            for token in tokens
            if token.type in (tokenize.OP, tokenize.NAME)
            for row, column in [token.start]
        ]
        self.names: list[str] = []
        self.found: list[tuple[int, int, int, str, str, str, ast.stmt]] = []
        for self.unit in ast.parse(source).body:
            self.visit(self.unit)

    def span(self, node) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node) -> str:
        return self.data[slice(*self.span(node))].decode()

    def tight(self, node) -> str:
        """The text of an expression, in parentheses where its neighbours could tear it apart."""
        return self.text(node) if isinstance(node, TIGHT) else f"({self.text(node)})"

    def word(self, word: str, left, right) -> tuple[int, int]:
        """Where the words of an operator stand between two operands."""
        low, high, parts = self.span(left)[1], self.span(right)[0], word.split()
        first, *_, last = (
            next(at for at, text in self.words if text == part and low <= at < high) for part in parts * 2
        )
        return first, last + len(parts[-1])

    def add(self, operator: str, span: tuple[int, int], new: str, at: int | None = None) -> None:
        function = ".".join(self.names) or "<module>"
        self.found.append((span[0] if at is None else at, *span, new, operator, function, self.unit))

    # What is left alone.

    def visit_Raise(self, node):
        pass

    visit_Assert = visit_Import = visit_ImportFrom = visit_JoinedStr = visit_Raise

    def visit_AnnAssign(self, node):
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node):
        self.names.append(node.name)
        for child in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if child is not None:
                self.visit(child)
        self.names.pop()

    def visit_ClassDef(self, node):
        self.names.append(node.name)
        for child in node.body:
            self.visit(child)
        self.names.pop()

    # What is changed.

    def visit_If(self, node):
        if "TYPE_CHECKING" in self.text(node.test):
            return
        if isinstance(node.test, TIGHT):
            self.add("negated", self.span(node.test), f"not {self.text(node.test)}")
        self.generic_visit(node)

    visit_IfExp = visit_If

    def visit_BinOp(self, node):
        name = type(node.op).__name__
        if name in ARITHMETIC and not any(map(self.is_sequence, (node.left, node.right))):
            old, new = ARITHMETIC[name]
            one = name in ("Mult", "Div") and isinstance(node.right, ast.Constant) and node.right.value == 1
            if not one:
                self.add(f"{old} to {new}", self.word(old, node.left, node.right), new)
        if name in BITS:
            self.flip(node, [node.left, node.right], *BITS[name])
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        self.flip(node, node.values, *BITS[type(node.op).__name__])
        self.generic_visit(node)

    def flip(self, node, operands, old: str, new: str) -> None:
        """The two bind differently, so the whole goes into parentheses."""
        spans = [self.word(old, left, right) for left, right in itertools.pairwise(operands)]
        start, end = self.span(node)
        cuts = [start, *(edge for span in spans for edge in span), end]
        parts = [self.data[a:b].decode() for a, b in zip(cuts[::2], cuts[1::2])]
        self.add(f"{old} to {new}", (start, end), f"({new.join(parts)})", at=spans[0][0])

    def visit_Compare(self, node):
        for op, (left, right) in zip(node.ops, itertools.pairwise([node.left, *node.comparators])):
            old, new = COMPARISONS[type(op).__name__]
            self.add(f"{old} to {new}", self.word(old, left, right), new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if type(node.op).__name__ in UNARY:
            self.add(f"{UNARY[type(node.op).__name__]} dropped", self.span(node), self.tight(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node):
        value, span = node.value, self.span(node)
        if isinstance(value, bool):
            self.add(f"{value} to {not value}", span, str(not value))
        elif isinstance(value, int):
            self.add("constant + 1", span, str(value + 1))
            if value and self.data[span[0] - 1 : span[0]] != b"-":  # of -1 there are already -2 and 1
                self.add("constant - 1", span, str(value - 1))
        elif isinstance(value, float):
            new = 1.0 if value == 0 else 0.0 if value == 1 or abs(value) < TINY else 2 * value
            self.add(f"constant to {new}", span, repr(new))

    def visit_Slice(self, node):
        for bound, step in ((node.lower, "+ 1"), (node.upper, "- 1"), (node.step, "+ 1")):
            # A bound with a number in it is changed through that.
            if bound is not None and not any(isinstance(part, ast.Constant) for part in ast.walk(bound)):
                self.add(f"bound {step}", self.span(bound), f"{self.text(bound)} {step}")
        self.generic_visit(node)

    def visit_keyword(self, node):
        if node.arg != "axis":
            return self.visit(node.value)
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) > 1:
            rest = "".join(f"{self.text(item)}, " for item in node.value.elts[1:])
            self.add("axis", self.span(node.value), f"({rest})")
        elif isinstance(node.value, (ast.Constant, ast.UnaryOp)):
            self.add("axis", self.span(node.value), {"0": "1", "2": "1"}.get(self.text(node.value), "0"))
        return None

    def visit_Call(self, node):
        function = self.text(node.func)
        name = function.rpartition(".")[2]
        if function.startswith("chex.assert_"):
            return
        if name in RENAMED and (isinstance(node.func, ast.Attribute) or name in ("min", "max", "any", "all")):
            end = self.span(node.func)[1]
            self.add(f"{name} to {RENAMED[name]}", (end - len(name), end), RENAMED[name])
        if name == "stop_gradient" and len(node.args) == 1:
            self.add("stop_gradient dropped", self.span(node), self.tight(node.args[0]))
        if name == "where" and len(node.args) == 3:
            (start, middle), (rest, end) = self.span(node.args[1]), self.span(node.args[2])
            swapped = self.text(node.args[2]) + self.data[middle:rest].decode() + self.text(node.args[1])
            self.add("where swapped", (start, end), swapped)
        self.generic_visit(node)

    def is_sequence(self, node) -> bool:
        """A tuple, list or text: minus and the like would only be a TypeError."""
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Slice) and self.text(node.value).endswith("shape")
        texts = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return texts or isinstance(node, (ast.Tuple, ast.List, ast.JoinedStr))


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of its text: each compiles, and no two are the same program."""
    maker, seen, mutants = Maker(source), set(), []
    data, starts = maker.data, maker.starts
    for at, start, end, new, operator, function, unit in sorted(maker.found, key=lambda found: found[:5]):
        lines = (min(item.lineno for item in (unit, *getattr(unit, "decorator_list", []))), unit.end_lineno)
        above, below = starts[lines[0] - 1], starts[lines[1]]
        whole, changed = data[above:below], data[above:start] + new.encode() + data[end:below]
        try:
            with warnings.catch_warnings(action="ignore"):  # such as: 0 is not callable
                compile(changed, file, "exec")
        except SyntaxError:
            continue
        trees = [(above, ast.dump(ast.parse(text))) for text in (whole, changed)]
        if trees[0] == trees[1] or trees[1] in seen:
            continue
        seen.add(trees[1])
        line = bisect.bisect(starts, at)
        first, last = data.rfind(b"\n", 0, start) + 1, (data + b"\n").find(b"\n", end)
        texts = (data[first:last], data[first:start] + new.encode() + data[end:last])
        original, mutated = (" ".join(text.decode().split()) for text in texts)
        column, source = len(data[starts[line - 1] : at].decode()), (data[:above] + changed + data[below:]).decode()
        digest, called = hashlib.sha256(whole).hexdigest()[:10], isinstance(unit, ast.FunctionDef)
        what = (operator, function, original, mutated, source)
        mutants.append(Mutant(file, line, column, *what, unit=lines, called=called, digest=digest))
    return mutants


def sample(mutants: list[Mutant], seed: int, number: int | None) -> list[Mutant]:
    """Shuffled by seed and id, so that a mutant keeps its turn when others come and go; at most so many of a file."""
    order = sorted(mutants, key=lambda mutant: hashlib.sha256(f"{seed}:{mutant.id}".encode()).digest())
    turns = collections.defaultdict(itertools.count)
    return [mutant for mutant in order if number is None or next(turns[mutant.file]) < number]


def why_equivalent(mutant: Mutant, table) -> str | None:
    """What the table says of a mutant; None for nothing."""
    for file, function, before, after, why in table:
        parts = mutant.original.split(before) if (file, function) == (mutant.file, mutant.function) else []
        for cut in range(1, len(parts)):
            if before.join(parts[:cut]) + after + before.join(parts[cut:]) == mutant.mutated:
                return why
    return None
