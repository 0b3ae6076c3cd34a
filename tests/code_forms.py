"""Results that programs return, and tests that plain Python passes with them.

Each form is (result, test, wrong result): `def f(): return RESULT` passes `assert TEST`, and fails
it with the wrong result. Also in plain Python: tests/test_code_rewards.py checks that.
"""

PROGRAM = """
import array, asyncio, collections, dataclasses, datetime, decimal, enum, fractions, functools
import itertools, json, operator, pathlib, types, typing, uuid, zoneinfo
import numpy as np
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction

class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __eq__(self, other): return isinstance(other, Vector) and self.key() == other.key()
    def __hash__(self): return hash(self.key())
    def key(self): return self.x, self.y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __sub__(self, other): return Vector(self.x - other.x, self.y - other.y)
    def __mul__(self, number): return Vector(self.x * number, self.y * number)
    def __rmul__(self, number): return self * number
    def __neg__(self): return self * -1
    def __abs__(self): return (self.x**2 + self.y**2) ** 0.5
    def __bool__(self): return bool(self.x or self.y)
    def __lt__(self, other): return abs(self) < abs(other)
    def __iter__(self): return iter(self.key())
    def __len__(self): return 2
    def __getitem__(self, i): return self.key()[i]
    def __contains__(self, number): return number in self.key()
    def __str__(self): return f"<{self.x} {self.y}>"
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __format__(self, spec): return format(self.x, spec)
    def __float__(self): return float(self.x)
    def __int__(self): return int(self.x)
    def __index__(self): return int(self.x)
    def __round__(self, digits=None): return round(self.x, digits)
    def __call__(self, number): return self.x * number
    def __enter__(self): return self.x
    def __exit__(self, *error): return False

@dataclasses.dataclass(order=True)
class Item:
    name: str
    size: int = 0

@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str

class Colour(enum.Enum):
    RED = 1
    BLUE = 2

class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2

class Word(str, enum.Enum):
    YES = "yes"
    NO = "no"

class Flag(enum.Flag):
    A = 1
    B = 2

Point = namedtuple("Point", "x y")
Pair = namedtuple("Pair", "count index")

class Place(typing.NamedTuple):
    x: int
    y: int = 0
    def norm(self): return abs(self.x) + abs(self.y)
    def __add__(self, other): return Place(self.x + other.x, self.y + other.y)

class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next

class Stack(list):
    def push(self, item): self.append(item)
    def peek(self): return self[-1]

class Cache(OrderedDict):
    def put(self, key, value): self[key] = value

class Name(str):
    def shout(self): return self.upper() + "!"

class Metres(float):
    pass

class Same:
    _one = None
    def __new__(cls):
        cls._one = cls._one or super().__new__(cls)
        return cls._one

class Failure(Exception):
    def __init__(self, text="", code=0):
        super().__init__(text)
        self.code = code

class Deeper(Failure): pass

def fail(error): raise error
def count_up(start=0):
    while True:
        yield start
        start += 1
async def later(value):
    await asyncio.sleep(0)
    return value
async def each(values):
    for value in values: yield value
def linked(values):
    node = None
    for value in reversed(values): node = Node(value, node)
    return node
def stacked(*items):
    stack = Stack()
    for item in items: stack.push(item)
    return stack
def cached(**items):
    cache = Cache()
    for item in items.items(): cache.put(*item)
    return cache
"""

TESTS = """
import array, asyncio, collections, datetime, decimal, fractions, itertools, json, math, operator
import pathlib, types, uuid, zoneinfo
import numpy as np
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from solution import *

def values_of(node):
    values = []
    while node:
        values.append(node.value)
        node = node.next
    return values

def raised(error, function):
    try:
        function()
    except error as caught:
        return caught
    return None

async def listed(items):
    return [item async for item in items]

def entered(value):
    with value as inside:
        return inside
"""

FORMS = [
    # scalars and their collections
    ("3", "f() == 3", "4"),
    ("3.0", "f() == 3", "3.5"),
    ("True", "f() is True", "False"),
    ("None", "f() is None", "0"),
    ("2 + 1j", "f() == 2 + 1j", "2"),
    ("'text'", "f() == 'text'", "'test'"),
    ("b'text'", "f() == b'text'", "'text'"),
    ("float('inf')", "math.isinf(f())", "1.0"),
    ("float('nan')", "math.isnan(f())", "1.0"),
    ("10**40", "f() == 10**40", "10**40 + 1"),
    ("[1, [2]]", "f() == [1, [2]]", "[1, [3]]"),
    ("(1, 2)", "f() == (1, 2)", "[1, 2]"),
    ("{1, 2}", "f() == {1, 2}", "{1, 3}"),
    ("frozenset({1})", "f() == {1}", "{2}"),
    ("{'a': [1]}", "f() == {'a': [1]}", "{'a': [2]}"),
    ("[(1, 'a')]", "f() == [(1, 'a')]", "[[1, 'a']]"),
    ("{(1, 2): {3}}", "f()[1, 2] == {3}", "{(1, 2): {4}}"),
    ("bytearray(b'ab')", "f() == b'ab'", "bytearray(b'ba')"),
    ("memoryview(b'ab')", "f() == b'ab'", "memoryview(b'ba')"),
    ("int", "f() is int", "float"),
    ("...", "f() is not None", "None"),
    # ranges and iterators
    ("range(3)", "f() == range(3)", "range(4)"),
    ("range(3)", "list(f()) == [0, 1, 2]", "range(4)"),
    ("range(0, 9, 3)", "len(f()) == 3 and 6 in f()", "range(0, 6, 3)"),
    ("slice(1, 3)", "[0, 1, 2, 3][f()] == [1, 2]", "slice(1, 2)"),
    ("(i * i for i in range(3))", "list(f()) == [0, 1, 4]", "(i for i in range(3))"),
    ("(i for i in [3, 1, 2])", "sorted(f()) == [1, 2, 3]", "(i for i in [3, 1])"),
    ("(i for i in [1, 2])", "tuple(f()) == (1, 2)", "(i for i in [2, 1])"),
    ("(i for i in [1, 2])", "sum(f()) == 3", "(i for i in [1, 1])"),
    ("(c for c in 'ab')", "''.join(f()) == 'ab'", "(c for c in 'ba')"),
    ("(i for i in [1, 2])", "next(f()) == 1", "(i for i in [2, 1])"),
    ("(i for i in [1])", "isinstance(f(), types.GeneratorType)", "[1]"),
    ("count_up(5)", "list(itertools.islice(f(), 2)) == [5, 6]", "count_up(6)"),
    ("count_up(5)", "[a for a, _ in zip(f(), 'ab')] == [5, 6]", "count_up(6)"),
    ("map(abs, [-1, 2])", "list(f()) == [1, 2]", "map(int, [-1, 2])"),
    ("filter(None, [0, 1])", "list(f()) == [1]", "filter(None, [0, 2])"),
    ("zip('ab', [1, 2])", "dict(f()) == {'a': 1, 'b': 2}", "zip('ab', [2, 1])"),
    ("enumerate('ab')", "list(f()) == [(0, 'a'), (1, 'b')]", "enumerate('ba')"),
    ("reversed([1, 2])", "list(f()) == [2, 1]", "reversed([2, 1])"),
    ("iter([1, 2])", "2 in f()", "iter([1, 3])"),
    ("itertools.chain([1], [2])", "list(f()) == [1, 2]", "itertools.chain([1])"),
    (
        "itertools.permutations([1, 2])",
        "set(f()) == {(1, 2), (2, 1)}",
        "itertools.permutations([1])",
    ),
    ("itertools.count(2)", "next(f()) == 2", "itertools.count(3)"),
    ("[range(2)]", "f() == [range(2)]", "[range(3)]"),
    # views and collections
    ("{'a': 1}.keys()", "f() == {'a'}", "{'b': 1}.keys()"),
    ("{'a': 1}.keys()", "list(f()) == ['a']", "{'b': 1}.keys()"),
    ("{'a': 1}.values()", "list(f()) == [1]", "{'a': 2}.values()"),
    ("{'a': 1}.items()", "list(f()) == [('a', 1)]", "{'a': 2}.items()"),
    ("{'a': 1}.items()", "f() == {('a', 1)}", "{'a': 2}.items()"),
    ("types.MappingProxyType({1: 2})", "f() == {1: 2}", "types.MappingProxyType({1: 3})"),
    ("Counter('aab')", "f() == Counter('aba')", "Counter('ab')"),
    ("Counter('aab')", "f() == {'a': 2, 'b': 1}", "Counter('ab')"),
    ("Counter('aab')", "f().most_common(1) == [('a', 2)]", "Counter('abb')"),
    ("Counter('aab')", "f()['z'] == 0", "{'z': 1}"),
    ("Counter('aab') - Counter('a')", "f() == Counter('ab')", "Counter('b')"),
    ("OrderedDict(a=1, b=2)", "f() == OrderedDict(a=1, b=2)", "OrderedDict(b=2, a=1)"),
    ("OrderedDict(a=1)", "list(f()) == ['a']", "OrderedDict(b=1)"),
    ("OrderedDict(a=1)", "f() == {'a': 1}", "OrderedDict(a=2)"),
    ("defaultdict(list, a=[1])", "f() == {'a': [1]}", "defaultdict(list)"),
    ("defaultdict(list)", "f()['x'] == []", "defaultdict(int)"),
    ("defaultdict(lambda: 0, a=1)", "f() == {'a': 1}", "defaultdict(lambda: 0)"),
    ("deque([1, 2])", "f() == deque([1, 2])", "deque([2, 1])"),
    ("deque([1, 2], 5)", "list(f()) == [1, 2] and f().maxlen == 5", "deque([1, 2])"),
    ("ChainMap({1: 2}, {3: 4})", "f() == {1: 2, 3: 4}", "ChainMap({1: 2})"),
    ("array.array('i', [1, 2])", "f() == array.array('i', [1, 2])", "array.array('i', [1])"),
    (
        "types.SimpleNamespace(a=1)",
        "f() == types.SimpleNamespace(a=1)",
        "types.SimpleNamespace(a=2)",
    ),
    # numbers, dates and paths
    ("Fraction(1, 2)", "f() == Fraction(2, 4)", "Fraction(1, 3)"),
    ("Fraction(1, 2)", "f() == 0.5", "Fraction(1, 3)"),
    ("Fraction(6, 3)", "f() == 2 and str(f()) == '2'", "Fraction(3)"),
    ("[Fraction(1, 2)]", "f() == [Fraction(1, 2)]", "[Fraction(1, 3)]"),
    ("Fraction(3, 4)", "f().numerator == 3", "Fraction(1, 4)"),
    ("Decimal('1.10')", "f() == Decimal('1.1')", "Decimal('1.11')"),
    ("Decimal('1.10')", "str(f()) == '1.10'", "Decimal('1.1')"),
    ("Decimal(3)", "f() == 3", "Decimal(4)"),
    ("Decimal('0.1') * 3", "abs(f() - Decimal('0.3')) < Decimal('1e-9')", "Decimal('0.4')"),
    (
        "datetime.date(2024, 2, 29)",
        "f() == datetime.date(2024, 2, 29)",
        "datetime.date(2024, 3, 1)",
    ),
    ("datetime.date(2024, 2, 29)", "f().isoformat() == '2024-02-29'", "datetime.date(2024, 3, 1)"),
    ("datetime.datetime(2024, 1, 2, 3)", "f().hour == 3", "datetime.datetime(2024, 1, 2)"),
    (
        "datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)",
        "f() == datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)",
        "datetime.datetime(2024, 1, 2)",
    ),
    ("datetime.time(1, 2)", "f() == datetime.time(1, 2)", "datetime.time(1, 3)"),
    ("datetime.timedelta(days=1)", "f().total_seconds() == 86400", "datetime.timedelta(2)"),
    ("uuid.UUID(int=1)", "f() == uuid.UUID(int=1)", "uuid.UUID(int=2)"),
    ("pathlib.PurePosixPath('a/b')", "f() == pathlib.PurePosixPath('a/b')", "'a/b'"),
    # NumPy
    ("np.int64(3)", "f() == 3", "np.int64(4)"),
    ("np.int64(3)", "isinstance(f(), np.integer)", "3"),
    ("np.float64(0.5)", "f() == 0.5 and f().item() == 0.5", "np.float64(0.6)"),
    ("np.float32(0.5)", "abs(f() - 0.5) < 1e-6", "np.float32(0.6)"),
    ("np.bool_(True)", "f() == True", "np.bool_(False)"),
    ("np.bool_(True)", "f()", "np.bool_(False)"),
    ("[np.int64(1), np.int64(2)]", "f() == [1, 2]", "[np.int64(1)]"),
    ("{'a': np.int64(1)}", "f() == {'a': 1}", "{'a': np.int64(2)}"),
    ("np.array([1, 2])", "np.array_equal(f(), np.array([1, 2]))", "np.array([1, 3])"),
    ("np.array([1, 2])", "(f() == [1, 2]).all()", "np.array([1, 3])"),
    ("np.array([[1, 2]])", "f().tolist() == [[1, 2]]", "np.array([1, 2])"),
    ("np.zeros((2, 3))", "f().shape == (2, 3)", "np.zeros((3, 2))"),
    ("np.array([0.1]) * 3", "np.allclose(f(), [0.3])", "np.array([0.4])"),
    ("np.array([1, 2])", "f().sum() == 3 and f().dtype == int", "np.array([1., 2.])"),
    ("np.array(['a'])", "list(f()) == ['a']", "np.array(['b'])"),
    ("np.array([None, 'a'])", "f().tolist() == [None, 'a']", "np.array([None, 'b'])"),
    (
        "np.datetime64('2024-01-02')",
        "f() == np.datetime64('2024-01-02')",
        "np.datetime64('2024-01-03')",
    ),
    # objects of the program
    ("Vector(1, 2)", "f() == Vector(1, 2)", "Vector(1, 3)"),
    ("Vector(1, 2)", "f() != Vector(2, 2)", "Vector(2, 2)"),
    ("[Vector(1, 2)]", "f() == [Vector(1, 2)]", "[Vector(1, 3)]"),
    ("{'a': Vector(1, 2)}", "f() == {'a': Vector(1, 2)}", "{'a': Vector(1, 3)}"),
    ("{Vector(1, 2)}", "f() == {Vector(1, 2)}", "{Vector(1, 3)}"),
    ("Vector(1, 2)", "f() in [Vector(0, 0), Vector(1, 2)]", "Vector(1, 3)"),
    ("Vector(1, 2)", "f() + Vector(1, 1) == Vector(2, 3)", "Vector(1, 3)"),
    ("Vector(1, 2)", "f() - Vector(1, 1) == Vector(0, 1)", "Vector(1, 3)"),
    ("Vector(1, 2)", "f() * 2 == Vector(2, 4)", "Vector(1, 3)"),
    ("Vector(1, 2)", "2 * f() == Vector(2, 4)", "Vector(1, 3)"),
    ("Vector(1, 2)", "-f() == Vector(-1, -2)", "Vector(1, 3)"),
    ("Vector(3, 4)", "abs(f()) == 5", "Vector(3, 5)"),
    ("Vector(1, 2)", "f() < Vector(2, 2)", "Vector(3, 2)"),
    ("[Vector(2, 0), Vector(1, 0)]", "[v.x for v in sorted(f())] == [1, 2]", "[Vector(2, 0)]"),
    ("Vector(1, 2)", "str(f()) == '<1 2>' and repr(f()) == 'Vector(1, 2)'", "Vector(1, 3)"),
    ("Vector(1, 2)", "f'{f():.1f} {f()!s}' == '1.0 <1 2>'", "Vector(1, 3)"),
    ("Vector(1, 2)", "(f().x, f().y) == (1, 2)", "Vector(1, 3)"),
    ("Vector(1, 2)", "list(f()) == [1, 2] and len(f()) == 2", "Vector(1, 3)"),
    ("Vector(1, 2)", "f()[1] == 2 and 2 in f()", "Vector(1, 3)"),
    ("Vector(0, 0)", "not f()", "Vector(1, 3)"),
    ("Vector(1, 2)", "math.isclose(float(f()), 1.0) and int(f()) == 1", "Vector(2, 3)"),
    ("Vector(1, 2)", "math.isclose(f(), 1.0) and 'ab'[f()] == 'b'", "Vector(2, 3)"),
    ("Vector(1.26, 2)", "round(f(), 1) == 1.3", "Vector(1.1, 2)"),
    ("Vector(3, 2)", "f()(2) == 6", "Vector(2, 2)"),
    ("Vector(3, 2)", "entered(f()) == 3", "Vector(2, 2)"),
    ("Vector(1, 2)", "isinstance(f(), Vector)", "(1, 2)"),
    ("Vector(1, 2)", "not isinstance(f(), Node)", "Node(1)"),
    ("Item('a', 1)", "f() == Item('a', 1)", "Item('a', 2)"),
    ("Item('a', 1)", "f() < Item('b')", "Item('c')"),
    ("Item('a', 1)", "repr(f()) == \"Item(name='a', size=1)\"", "Item('a', 2)"),
    ("[Item('a')]", "f() == [Item('a')]", "[Item('b')]"),
    ("{Frozen('a'): 1}", "f()[Frozen('a')] == 1", "{Frozen('a'): 2}"),
    ("vars(Item('a', 1))", "f() == {'name': 'a', 'size': 1}", "{}"),
    ("Item('a', 1)", "f().__dict__ == {'name': 'a', 'size': 1}", "Item('a')"),
    ("Colour.RED", "f() == Colour.RED and f() is Colour.RED", "Colour.BLUE"),
    ("Colour.RED", "f().value == 1 and f().name == 'RED'", "Colour.BLUE"),
    ("[Colour.RED]", "f() == [Colour(1)]", "[Colour.BLUE]"),
    ("{Colour.RED: 1}", "f() == {Colour.RED: 1}", "{Colour.BLUE: 1}"),
    ("Level.HIGH", "f() == 2", "Level.LOW"),
    ("Level.HIGH", "f() > Level.LOW and f().name == 'HIGH'", "Level.LOW"),
    ("Word.YES", "f() == 'yes' and f().value == 'yes'", "Word.NO"),
    ("Word.YES", "f() == Word.YES", "Word.NO"),
    ("Flag.A | Flag.B", "Flag.A in f() and f() == Flag.A | Flag.B", "Flag.B"),
    ("Point(1, 2)", "f() == (1, 2)", "Point(1, 3)"),
    ("Point(1, 2)", "f().y == 2 and f()._asdict() == {'x': 1, 'y': 2}", "Point(1, 3)"),
    ("Point(1, 2)", "f() == Point(1, 2)", "Point(1, 3)"),
    ("Pair(3, 4)", "(f().count, f().index) == (3, 4)", "Pair(3, 5)"),
    ("[Point(1, 2)]", "f() == [(1, 2)] and f()[0].x == 1", "[Point(1, 3)]"),
    ("Place(1, 2)", "f().norm() == 3 and f() + Place(1) == (2, 2)", "Place(1, 3)"),
    ("stacked(1, 2)", "f() == [1, 2]", "stacked(2, 1)"),
    ("stacked(1, 2)", "f().peek() == 2 and len(f()) == 2", "stacked(2, 1)"),
    ("stacked(1, 2)", "isinstance(f(), list) and sorted(f()) == [1, 2]", "(1, 2)"),
    ("cached(a=1)", "f() == {'a': 1} and f()['a'] == 1", "cached(a=2)"),
    ("Name('bob')", "f() == 'bob' and f().shout() == 'BOB!'", "Name('rob')"),
    ("Name('bob')", "'-'.join([f(), 'x']) == 'bob-x'", "Name('rob')"),
    ("Metres(1.5)", "f() == 1.5 and f() - 1 == 0.5", "Metres(2.5)"),
    ("linked([1, 2])", "values_of(f()) == [1, 2]", "linked([1, 3])"),
    ("None", "values_of(f()) == []", "linked([1])"),
    ("Same()", "f() is Same()", "object()"),
    # functions, exceptions and coroutines
    ("lambda x: x + 1", "f()(2) == 3", "lambda x: x + 2"),
    ("functools.partial(pow, 2)", "f()(3) == 8", "functools.partial(pow, 3)"),
    ("lambda g: g(2)", "f()(lambda x: x * 10) == 20", "lambda g: g(3)"),
    ("lambda g, xs: [x for x in xs if g(x)]", "f()(lambda x: x > 1, [1, 2]) == [2]", "filter"),
    (
        "lambda xs, key: sorted(xs, key=key)",
        "f()([1, -2], key=abs) == [1, -2]",
        "lambda xs, key: sorted(xs)",
    ),
    ("lambda: fail(Failure('bad', 7))", "raised(Failure, f()).code == 7", "lambda: None"),
    ("lambda: fail(Failure('bad'))", "str(raised(Exception, f())) == 'bad'", "lambda: None"),
    (
        "lambda: fail(Deeper())",
        "isinstance(raised(Failure, f()), Deeper)",
        "lambda: fail(Failure())",
    ),
    ("lambda: fail(KeyError('k'))", "raised(KeyError, f()).args == ('k',)", "lambda: None"),
    ("lambda: json.loads('{')", "raised(json.JSONDecodeError, f())", "lambda: None"),
    ("lambda: fail(SystemExit(3))", "raised(SystemExit, f()).code == 3", "lambda: None"),
    ("later(3)", "asyncio.run(f()) == 3", "later(4)"),
    ("each([1, 2])", "asyncio.run(listed(f())) == [1, 2]", "each([2])"),
]
