"""Read LaTeX and plain formulas as trees, computing nothing.

Text is read, never evaluated; length and depth are bounded. Anything unknown to the grammar (a command, a bracket
that never closes) makes the whole text unreadable, which is None.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from fractions import Fraction

from covey_graders.math.formulas.nodes import (
    BOTH,
    DOUBLE_SIGN,
    RELATION,
    FunctionCall,
    Grouping,
    Node,
    Number,
    Power,
    Product,
    Quotient,
    Root,
    Sum,
    Symbol,
    coprime,
    is_inequality,
    negative,
    numeral_value,
    times,
    walk,
)
from covey_graders.math.formulas.values import DEGREE, FUNCTIONS_OF_NUMBERS
from covey_graders.math.formulas.words import (
    AND,
    BARS,
    CALLS,
    FUNCTIONS,
    MAX_TOKENS,
    RELATIONS,
    SETS,
    SYMBOLS,
    WORD,
    tokens_of,
)

MAX_DEPTH = 30
MAX_INDEX = 100
"""Largest index of a root."""


def read_tree(text: str) -> Node | None:
    """Return the tree of a formula, None where it cannot be read.

    >>> read_tree("12x+7")
    Sum(terms=(Product(factors=(Number(value=Fraction(12, 1)), Symbol(name='x'))), Number(value=Fraction(7, 1))))
    """
    tokens = tokens_of(text)
    if not 0 < len(tokens) <= MAX_TOKENS:
        return None
    reader = _Reader(tokens)
    try:
        node = reader.formula()
    except _Unreadable:
        return None
    return node if reader.is_at_end() else None


class _Unreadable(Exception):
    pass


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0
        self._depth = 0
        self._bar = ""
        """The closing bar that is waited for."""

    def is_at_end(self) -> bool:
        return self._position == len(self._tokens)

    def _peek(self) -> str:
        return "" if self.is_at_end() else self._tokens[self._position]

    def _next(self) -> str:
        if self.is_at_end():
            raise _Unreadable
        self._position += 1
        return self._tokens[self._position - 1]

    def _expect(self, *wanted: str) -> None:
        if self._next() not in wanted:
            raise _Unreadable

    def _take(self, wanted: Collection[str]) -> str:
        """Return the next token if it is wanted, else nothing."""
        return self._next() if self._peek() in wanted and not self.is_at_end() else ""

    def _is_over(self) -> bool:
        """Check whether the current expression ends before the next token."""
        token = self._peek()
        return token in ENDINGS or token == self._bar

    def formula(self) -> Node:
        """Read members with separators between, or the one member there is."""
        members = [self._relation()]
        separators: set[str] = set()
        while separator := self._take(SETS["separators"]):
            if self._is_over():  # a separator at the end of a row
                break
            separators.add(separator)
            members.append(self._relation())
        kind = BOTH if separators == {AND} and all(map(is_inequality, members)) else "list"
        return members[0] if len(members) == 1 else Grouping(kind, tuple(members))

    def _relation(self) -> Node:
        found = [self._sum()]
        relations: list[str] = []
        while relation := self._take(RELATIONS):
            relations.append(relation)
            found.append(self._sum())
        return found[0] if not relations else Grouping(" ".join([RELATION, *relations]), tuple(found))

    def _sum(self) -> Node:
        terms = [self._signed(self._product)]
        while self._peek() in SIGNS:
            terms.append(self._signed(self._product))
        return terms[0] if len(terms) == 1 else Sum(tuple(terms))

    def _signed(self, read: Callable[[], Node]) -> Node:
        sign = self._take(SIGNS)
        if not sign:
            return read()
        if self._peek() in SIGNS:
            self._take(SIGNS)
            return FunctionCall(DOUBLE_SIGN, (read(),))
        if sign in "+-":
            return negative(read()) if sign == "-" else read()
        return Product((Symbol("\\pm"), read()))

    def _product(self) -> Node:
        node = self._mixed()
        while True:
            operation = self._take(BINARY)
            if operation in SETS["divisions"]:
                node = Quotient(node, self._signed(self._factor))
            elif operation and self._peek() in SIGNS:
                node = times(node, FunctionCall(DOUBLE_SIGN, (self._signed(self._factor),)))
            elif operation or not (self._is_over() or self._peek() in CONTINUATIONS):
                if not operation and self._peek()[0].isdecimal() and self._tokens[self._position - 1][-1].isdecimal():
                    raise _Unreadable  # 5 6 7 is no product
                is_applied = not operation and self._peek() == "(" and isinstance(node, Symbol | Power | FunctionCall)
                node = replace(times(node, self._factor()), is_applied=is_applied)
            else:
                return node

    def _mixed(self) -> Node:
        """Read a factor, of which `2\\frac{1}{2}` is one."""
        node = self._factor()
        if not (isinstance(node, Number) and node.value.denominator == 1 and self._peek() in SETS["fractions"]):
            return node
        part = self._factor()
        if isinstance(part, Quotient) and isinstance(part.top, Number) and isinstance(part.bottom, Number):
            is_part = 0 < part.top.value < part.bottom.value and coprime(part.top.value, part.bottom.value)
            return Number(node.value + part.top.value / part.bottom.value) if is_part else times(node, part)
        return times(node, part)

    def _factor(self) -> Node:
        """Read an atom with its suffixes, superscripts and subscripts."""
        node = self._atom()
        while mark := self._take(MARKS):
            if mark == "^":
                exponent = self._script()
                part = numeral_value(exponent)  # x^{2/3} holds no fraction within a fraction
                exponent = exponent if part is None else Number(part)
                node = times(node, DEGREE) if exponent in DEGREES else Power(node, exponent)
            elif mark == "_":
                index = self._script()
                node = (
                    Symbol(f"{node}_{index}") if isinstance(node, Symbol | Number) else FunctionCall("_", (node, index))
                )
            else:
                node = FunctionCall("factorial" if mark == "!" else "derivative", (node,))
        return node

    def _script(self) -> Node:
        return self._signed(self._argument if self._peek() in {"{", "\\frac"} else self._atom)

    def _argument(self) -> Node:
        """Read the argument of a command: a group, or one character."""
        token = self._peek()
        if len(token) > 1 and token.isdigit():  # \frac34 is three quarters
            self._tokens[self._position] = token[1:]
            return Number(Fraction(token[0]))
        return self._atom()

    def _atom(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _Unreadable
        token = self._next()
        if token[0].isdecimal() or (token[0] == "." and len(token) > 1):
            node: Node = Number(_value(token))
        else:
            node = self._letters(token) if token.isalpha() else self._notation(token)
        self._depth -= 1
        return node

    def _notation(self, token: str) -> Node:
        for read, tokens in (
            (Symbol, SYMBOLS),
            (self._fraction, SETS["fractions"]),
            (self._root, SETS["roots"]),
            (self._grouped, SETS["groups"]),
            (self._bracketed, SETS["opening"]),
            (self._barred, BARS),
            (self._worded, SETS["texts"]),
            (self._decorated, SETS["decorations"]),
            (self._called, CALLS),
            (self._matrix, SETS["matrices"]),
        ):
            if token in tokens:
                return read(token)
        raise _Unreadable

    def _fraction(self, token: str) -> Node:
        return Quotient(self._argument(), self._argument())

    def _root(self, token: str) -> Node:
        index: Node = Number(Fraction(2))
        if self._take("["):
            index = self._sum()
            self._expect("]")
        if not (isinstance(index, Number) and index.value in range(2, MAX_INDEX)):
            raise _Unreadable
        return Root(self._argument(), int(index.value))

    def _inside(self, *closing: str) -> Node:
        """Read up to a closing bracket; outer bars do not end it."""
        bar, self._bar = self._bar, ""
        node = self.formula()
        self._expect(*closing)
        self._bar = bar
        return node

    def _grouped(self, token: str) -> Node:
        return self._inside("}")

    def _bracketed(self, token: str) -> Node:
        if self._take(CLOSING):
            return Symbol("\\emptyset") if token in SETS["sets"] else Grouping(token, ())
        node = self._inside(*CLOSING)
        if isinstance(node, Grouping) and node.kind == "list":
            return Grouping(token + self._tokens[self._position - 1], node.members)
        if isinstance(node, Grouping) and node.kind.startswith("matrix"):
            return Grouping(f"p{node.kind}", node.members)
        return Grouping(token, (node,)) if token in SETS["sets"] else node

    def _barred(self, token: str) -> Node:
        bar, self._bar = self._bar, BARS[token]
        node = self.formula()
        self._expect(self._bar)
        self._bar = bar
        return FunctionCall(token, (node,))

    def _matrix(self, token: str) -> Node:
        name = self._name()
        if name == ["a", "r", "r", "a", "y"] and self._peek() == "{":
            self._name()
        begin = self._position
        node = self._inside("\\end")
        num_rows = 1 + self._tokens[begin : self._position - 2].count("\\\\")  # the last one may end with a break
        if self._name() != name:
            raise _Unreadable
        return Grouping(f"{''.join(name)} {num_rows}", node.members if isinstance(node, Grouping) else (node,))

    def _letters(self, token: str) -> Node:
        """Read a letter, or a function's name without a backslash."""
        end = self._position
        while end < len(self._tokens) and self._tokens[end].isalpha() and len(self._tokens[end]) == 1:
            end += 1
        run = "".join(self._tokens[self._position - 1 : end])
        if run not in FUNCTIONS | {"sqrt", "pi"}:
            return Symbol(token)
        self._position = end
        return (
            self._called(f"\\{run}") if run in FUNCTIONS else Symbol("\\pi") if run == "pi" else Root(self._atom(), 2)
        )

    def _name(self) -> list[str]:
        """Read the tokens of `{pmatrix}`."""
        self._expect("{")
        begin = self._position
        while self._next() != "}":
            pass
        return self._tokens[begin : self._position - 1]

    def _worded(self, token: str) -> Node:
        """Read a word, a unit, or mathematics in a text command."""
        if self._peek() != "{":
            return self._argument()
        before = self._position
        name = self._name()
        word = "".join(name).lower()
        if word in FUNCTIONS:
            return self._called(f"\\{word}")
        if len(name) == 1 and word.isalpha():
            return Symbol(name[0])
        if WORD.fullmatch(word):
            return Symbol(f"text:{word}")
        self._position = before
        return self._argument()

    def _decorated(self, token: str) -> Node:
        node = self._argument()
        is_name = all(isinstance(part, Symbol | Product) for part in walk(node))
        return Symbol(f"{token} {node}") if is_name else FunctionCall(token, (node,))

    def _called(self, token: str) -> Node:
        """Read a function with its subscript, superscript and argument."""
        arguments: list[Node] = []
        powers: list[Node] = []
        while script := self._take(SCRIPTS):
            kept = powers if script == "^" and token in FUNCTIONS_OF_NUMBERS else arguments
            kept.append(self._script())
        if token in SETS["binomials"]:
            arguments += [self._argument(), self._argument()]
        elif self._peek() == "-" or not (self._is_over() or self._peek() in CONTINUATIONS | BINARY):
            arguments.append(self._atom() if self._peek() == "(" else self._signed(self._operand))
        is_power = token == "\\exp" and len(arguments) == 1
        node = Power(Symbol("e"), arguments[0]) if is_power else FunctionCall(token, tuple(arguments))
        return Power(node, powers[0]) if powers else node

    def _operand(self) -> Node:
        """Read a function's argument without brackets: the `2x` of `\\sin 2x`."""
        node = self._factor()
        while self._peek() != "e" and (self._peek() in OPERANDS or self._peek()[:1].isalnum()):
            node = times(node, self._factor())
        return node


def _value(token: str) -> Fraction:
    """Return the value of a decimal number, `0.1\\overline{6}` too."""
    written, bar, repeated = token.partition("\\overline{")
    if not bar:
        return Fraction(token)
    whole, _, places = written.partition(".")
    period = repeated.rstrip("}")
    tail = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(places))
    return Fraction(f"{whole or 0}.{places or 0}") + tail


SIGNS, BINARY, CLOSING = SETS["signs"], SETS["binary"], SETS["closing"]
ENDINGS = CLOSING | {"", "}", "\\end"}
CONTINUATIONS = SETS["separators"] | RELATIONS | SIGNS
"""Tokens that end a product but not the expression around it."""
SCRIPTS = frozenset("_^")
MARKS = SCRIPTS | frozenset("!'\u2032")
OPERANDS = SYMBOLS | SETS["fractions"] | SETS["roots"] | SETS["texts"]
DEGREES = (Symbol("\\circ"), Symbol("\\degree"), Symbol("°"))
