"""An inert reading of pickles: their structure, with nothing in them imported or called.

A pickle is a program for a stack machine that may call any function of any module. `read_pickle`
follows the same program with records in the place of calls: a global becomes a `Global` (two
strings), a call a `Record` (what would have been called, with what). Making something of a `Record`
is up to the caller. Calls of what no model needs (`os.system`, say) are refused by name, so that
nobody takes such a file for a model.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class PickleError(Exception):
    """A pickle that is damaged, or that would call what no model needs."""

    def __init__(self, message: str, *, dangerous: str | None = None) -> None:
        super().__init__(message)
        self.dangerous = dangerous
        """The global that the pickle would call, where that is why it is refused."""


@dataclass(frozen=True)
class Global:
    """A name in a module, as text; the module is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, repr=False)
class Record:
    """What a pickle would have built: callee and arguments, its state, and items put in it."""

    callee: Global
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<{self.callee}>"  # short: what it holds may be shared a billion times

    def attributes(self) -> dict[Any, Any]:
        """The state as a dictionary; of a (dictionary, slots) pair both; else empty."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {k: v for part in parts if isinstance(part, dict) for k, v in part.items()}


@dataclass(frozen=True)
class Persistent:
    """What the pickle leaves to its container by an id, such as a tensor's storage."""

    id: Any


_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "UserDict": "collections"}
"""Modules that protocol 2 calls by their Python 2 names."""

_HARMLESS = {
    "_codecs": {"encode"},
    "argparse": {"Namespace"},
    "builtins": {
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list",
        "object", "range", "set", "slice", "str", "tuple",
    },
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "copyreg": {"_reconstructor", "__newobj__", "__newobj_ex__"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "functools": {"partial"},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "re": {"_compile"},
    "types": {"SimpleNamespace"},
    "uuid": {"UUID"},
}  # fmt: skip
"""Of the standard library: what builds plain values."""

_REBUILDERS = (
    "_rebuild_", "_reconstruct", "scalar", "dtype", "device", "ndarray", "_load_from_bytes"
)  # fmt: skip
"""Of other packages: functions, by the start of their name, that rebuild arrays and tensors."""


def _may_stand_as_record(callee: Global, arguments: tuple[Any, ...]) -> bool:
    """Whether a call is one that pickles of models make to build their objects."""
    module = callee.module
    if module == "builtins" and callee.name == "getattr":
        return bool(arguments) and isinstance(arguments[0], Record)  # a bound method of an object
    if module.partition(".")[0] in sys.stdlib_module_names:
        return callee.name in _HARMLESS.get(module, ())
    last = callee.name.rpartition(".")[2]
    return last[:1].isupper() or last.startswith(_REBUILDERS)


def _plain(key: Any) -> Any:
    """A key of a dictionary or a set, refused where hashing it could go deep or fail."""
    parts = key if isinstance(key, tuple) else (key,)
    if all(isinstance(p, (str, int, float, bytes, Global, Record, type(None))) for p in parts):
        return key
    raise PickleError(f"a {type(key).__name__} is used as a key")


_MARK = object()


def read_pickle(data: bytes) -> Any:
    """The value of a pickle of any protocol, its objects as records. Raises PickleError."""
    return _Machine().load(data)


class _Machine:
    """The stack machine; a method an instruction."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def load(self, data: bytes) -> Any:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    return self.pop()
                self.step(opcode.name, argument)
        except PickleError:
            raise
        except (
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            # What a damaged program does to the stack: each is a way of popping a wrong value.
            raise PickleError(f"damaged pickle: {error or type(error).__name__}") from error
        raise PickleError("the pickle ends before its end mark")

    def step(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        if name in _PUSH_ARGUMENT:
            self.stack.append(argument)
        elif name in _PUSH_NEW:
            self.stack.append(_PUSH_NEW[name]())
        elif name in _METHODS:
            _METHODS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            raise PickleError(f"pickle instruction {name} is not supported")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise PickleError("damaged pickle: a mark where a value should be")
        return value

    def pop_to_mark(self) -> list[Any]:
        start = len(self.stack) - 1
        while start >= 0 and self.stack[start] is not _MARK:
            start -= 1
        if start < 0:
            raise PickleError("damaged pickle: no mark")
        values = self.stack[start + 1 :]
        del self.stack[start:]
        return values

    def pop_tuple(self, size: int) -> tuple[Any, ...]:
        return tuple(reversed([self.pop() for _ in range(size)]))

    # ---- globals and calls ----------------------------------------------------------------------

    def push_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("damaged pickle: the name of a global is no text")
        self.stack.append(Global(_PYTHON_2.get(module, module), name))

    def call(self, callee: Any, arguments: Any) -> None:
        if not isinstance(callee, Global) or not isinstance(arguments, tuple):
            raise PickleError(f"the pickle would call {type(callee).__name__}, which is no global")
        if not _may_stand_as_record(callee, arguments):
            raise PickleError(f"loading it would call {callee}", dangerous=str(callee))
        if callee.module == "copyreg" and arguments and isinstance(arguments[0], Global):
            self.call(arguments[0], arguments[1:])
            return
        self.stack.append(Record(callee, arguments))

    def op_global(self, argument: str) -> None:
        self.push_global(*argument.split(" ", 1))

    def op_stack_global(self, _: Any) -> None:
        self.push_global(*self.pop_tuple(2))

    def op_reduce(self, _: Any) -> None:
        self.call(*self.pop_tuple(2))

    def op_newobj_ex(self, _: Any) -> None:
        callee, positional, named = self.pop_tuple(3)
        self.call(callee, (*positional, *named.values()))

    def op_inst(self, argument: str) -> None:
        arguments = tuple(self.pop_to_mark())
        self.push_global(*argument.split(" ", 1))
        self.call(self.pop(), arguments)

    def op_obj(self, _: Any) -> None:
        callee, *arguments = self.pop_to_mark()
        self.call(callee, tuple(arguments))

    def op_build(self, _: Any) -> None:
        state, target = self.pop(), self.stack[-1]
        if not isinstance(target, Record):
            raise PickleError(f"damaged pickle: state for a {type(target).__name__}")
        target.state = state

    # ---- containers -----------------------------------------------------------------------------

    def op_setitem(self, _: Any) -> None:
        self.set_items(list(self.pop_tuple(2)))

    def op_setitems(self, _: Any) -> None:
        self.set_items(self.pop_to_mark())

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        items = target.items if isinstance(target, Record) else target
        if not isinstance(items, dict):
            raise PickleError(f"damaged pickle: items for a {type(target).__name__}")
        items.update(zip(map(_plain, flat[::2]), flat[1::2], strict=True))

    def op_append(self, _: Any) -> None:
        self.extend([self.pop()])

    def op_appends(self, _: Any) -> None:
        self.extend(self.pop_to_mark())

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        elements = target.elements if isinstance(target, Record) else target
        if isinstance(elements, list):
            elements.extend(values)
        elif isinstance(elements, set):
            elements.update(map(_plain, values))
        else:
            raise PickleError(f"damaged pickle: elements for a {type(target).__name__}")

    def op_dict(self, _: Any) -> None:
        flat = self.pop_to_mark()
        self.stack.append(dict(zip(map(_plain, flat[::2]), flat[1::2], strict=True)))

    # ---- the stack and the memo -----------------------------------------------------------------

    def op_put(self, argument: Any) -> None:
        self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]

    def op_get(self, argument: Any) -> None:
        self.stack.append(self.memo[int(argument)])

    def op_binpersid(self, _: Any) -> None:
        self.stack.append(Persistent(self.pop()))


_PUSH_ARGUMENT = frozenset(
    (
        "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT",
        "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
        "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
    )
)  # fmt: skip
_PUSH_NEW: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "MARK": lambda: _MARK,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}


_METHODS: dict[str, Callable[[_Machine, Any], Any]] = {
    "GLOBAL": _Machine.op_global,
    "STACK_GLOBAL": _Machine.op_stack_global,
    "REDUCE": _Machine.op_reduce,
    "NEWOBJ": _Machine.op_reduce,  # class and arguments: the same to a reader
    "NEWOBJ_EX": _Machine.op_newobj_ex,
    "INST": _Machine.op_inst,
    "OBJ": _Machine.op_obj,
    "BUILD": _Machine.op_build,
    "SETITEM": _Machine.op_setitem,
    "SETITEMS": _Machine.op_setitems,
    "APPEND": _Machine.op_append,
    "APPENDS": _Machine.op_appends,
    "ADDITEMS": _Machine.op_appends,
    "DICT": _Machine.op_dict,
    "LIST": lambda m, _: m.stack.append(m.pop_to_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "FROZENSET": lambda m, _: m.stack.append(frozenset(map(_plain, m.pop_to_mark()))),
    "TUPLE1": lambda m, _: m.stack.append(m.pop_tuple(1)),
    "TUPLE2": lambda m, _: m.stack.append(m.pop_tuple(2)),
    "TUPLE3": lambda m, _: m.stack.append(m.pop_tuple(3)),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "PUT": _Machine.op_put,
    "BINPUT": _Machine.op_put,
    "LONG_BINPUT": _Machine.op_put,
    "MEMOIZE": _Machine.op_put,
    "GET": _Machine.op_get,
    "BINGET": _Machine.op_get,
    "LONG_BINGET": _Machine.op_get,
    "PERSID": lambda m, argument: m.stack.append(Persistent(argument)),
    "BINPERSID": _Machine.op_binpersid,
}
