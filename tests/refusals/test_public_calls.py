"""Every public function, with one argument of a wrong type, shape, dtype, device or range: the error is one
sentence that begins with the function's name, and never one of an inner function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_fattn
from tests.helpers.public_calls import LEFT_OUT, VALID, Arguments, Public, find
from tests.helpers.tensors import same_bits

PUBLIC = find()
WITH_ARGUMENTS = sorted(name for name, public in PUBLIC.items() if public.parameters and name not in LEFT_OUT)
ERRORS = (IndexError, NotImplementedError, OSError, RuntimeError, TypeError, ValueError)
RAW = (
    "unflatten",
    "Exception raised",
    "schema",
    "Expected a value of type",
    "has no attribute",
    "Declaration:",
    "fattn::",
    "object is not",
)
# These pass calls without a kernel on to torch or ComfyUI, which then refuse shapes and values.
HANDED_ON = {"torch_fattn.sdpa", "torch_fattn.integrations.comfyui.attention_override"}
# transformers calls these with the arguments of models: only the arguments in use are checked.
CALLED_BY_TRANSFORMERS = {name for name in PUBLIC if name.endswith((".attend", ".flash_attn_forward"))}
# The reference has fewer limits than the operators and accepts such numbers.
LENIENT = {name for name in PUBLIC if name.startswith("torch_fattn.reference.")} | HANDED_ON

# Names of tensors, and of no other things.
_TENSORS = {
    what
    for public in PUBLIC.values()
    for what, each in public.parameters.items()
    if "Tensor" in each.annotation
} - {"a", "x", "state", "scores", "softcap", "func", "out"}
OF_MANY_TYPES: list[Any] = [
    None,
    "wrong",
    1.5,
    3,
    True,
    [1.5],
    ["a"],
    {},
    object(),
    torch.ones(2, 3),
    torch.int8,
]
OF_MANY_TYPES += [Tensor, np.array([1, 0]), np.array(3)]


def takes(annotation: str, value: Any) -> bool:
    """Whether an annotation allows the value, decided by its text, not by the rules under test."""
    by_text: dict[str, Callable[[Any], bool]] = {
        "Any": lambda v: True,
        "None": lambda v: v is None,
        "Tensor": lambda v: isinstance(v, Tensor),
        "bool": lambda v: isinstance(v, bool),
        "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
        "str": lambda v: isinstance(v, str),
        "torch.dtype": lambda v: isinstance(v, torch.dtype),
        "torch.device": lambda v: isinstance(v, torch.device),
        "Sequence[int]": lambda v: isinstance(v, list) and not {*map(type, v)} - {int},
        "os.PathLike[str]": lambda v: False,
        "Sequence[Sequence[int]]": lambda v: False,
        "OnUnsupported": lambda v: isinstance(v, str) and v in ("error", "sdpa"),
        "Window": lambda v: v is None,
        "Iterable[tuple[str, Mapping[str, Any]]]": lambda v: isinstance(v, dict),
        "Mapping[str, Any]": lambda v: isinstance(v, dict),
        "Callable[..., Tensor]": callable,
    }
    return any(by_text.get(part, lambda v: False)(value) for part in annotation.split(" | "))


def wrong_types(public: Public) -> Iterator[tuple[str, Any]]:
    for what, parameter in public.parameters.items():
        for value in OF_MANY_TYPES:
            if not takes(parameter.annotation, value):
                yield what, value


def wrong_values(arguments: Arguments, public: Public) -> Iterator[tuple[str, Any]]:
    """Values of the right type that may not fit: a sentence, or a result."""
    for what, parameter in public.parameters.items():
        given = arguments.get(what, parameter.default)
        if isinstance(given, Tensor):
            yield from ((what, changed) for changed in _misshapen(given))
        elif "Tensor" in parameter.annotation:
            for shape in ((), (0,), (3,), (2, 3), (1, 1, 1, 1, 1)):
                yield from ((what, torch.ones(shape, dtype=d)) for d in (torch.float32, torch.int32))
        numbers: list[Any] = []
        if "int" in parameter.annotation.split(" | "):
            numbers += [-1, -7, 0, 1, 600, 2**70, -(2**70), 10**400, np.int64(2)]
            numbers += [] if public.made else [2**31]  # which would be memory
        if "float" in parameter.annotation.split(" | "):
            numbers += [float("nan"), float("inf"), -1.0, 0.0, 1e39, 1e-60, Fraction(1, 2)]
        if "str" in parameter.annotation:
            numbers += ["", "int8", "int4", "fp8_e4m3", "a\nb", "\ud800", "x" * 500]
        if "torch.dtype" in parameter.annotation:
            numbers += [torch.int8, torch.float64, torch.complex64, torch.bool]
        if "Sequence[int]" in parameter.annotation:
            numbers += [[], [0, 0], [-1], [7], [1, 2, 3], [2**70, 1]]
        yield from ((what, number) for number in numbers)


def _misshapen(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor[None]
    yield torch.ones((), dtype=tensor.dtype)
    yield tensor.to("meta")
    with torch.inference_mode():
        yield tensor.clone()
    if tensor.is_floating_point():
        yield tensor.clone().requires_grad_()
        yield tensor._neg_view()
    for dim in range(tensor.dim()):
        yield tensor.select(dim, 0)
        yield tensor.narrow(dim, 0, 0)
        yield tensor.narrow(dim, 0, max(tensor.shape[dim] - 1, 0))
        yield torch.cat((tensor, tensor), dim)
    for dtype in (torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool):
        yield tensor.to(dtype)
    yield tensor.to(torch.complex64)


def outcome(public: Public, arguments: Arguments) -> Exception | None:
    arguments = dict(arguments)
    owner = arguments.pop("self", None)
    function = public.made or public.function if owner is None else public.function.__get__(owner)
    try:
        function(**arguments)
    except Exception as error:
        return error
    return None


def fault_of(public: Public, error: Exception, words: list[str]) -> str:
    """What is wrong with the error message; empty if it follows the rules."""
    text = str(error)
    if not isinstance(error, ERRORS) or isinstance(error, (AttributeError, RecursionError)):
        return f"{type(error).__name__}: {text}"
    if "\n" in text or len(text) > 300 or any(raw in text for raw in RAW):
        return f"raw: {text[:300]!r}"
    named = next((name for name in public.names if text.startswith(f"{name}: ")), None)
    if named is None:
        return f"nameless {type(error).__name__}: {text}"
    if not any(word in text.removeprefix(named) for word in words):
        return f"none of {words} in: {text}"
    message = re.findall(
        r"(?<!-)\b\w+\b(?!-)", text.removeprefix(named).replace("be stored", "").partition("; ")[0]
    )
    message = [] if named.startswith("fattn attention") else message  # mask, as transformers calls it
    if foreign := [word for word in message if word in _TENSORS - public.parameters.keys()]:
        return f"{foreign[0]} is not one of its arguments: {text}"
    return ""


def described(what: str, value: Any) -> list[str]:
    """Words, one of which shows that the sentence is about this argument."""
    words = [what, "mask" if "mask" in what else what, "sinks" if what == "s_aux" else what]
    if isinstance(value, Tensor):
        sizes = [str(size + more) for size in value.shape for more in (0, 1)]  # starts are one more
        words += [str(value.dtype), str(value.device), str(list(value.shape)), *sizes]
    elif isinstance(value, list):
        words += map(str, value)
    elif value is not None:
        words += [str(value), repr(value)[:50]]
    return words


def state_of(arguments: Arguments) -> Any:
    cache = arguments.get("self")
    on_device = getattr(getattr(cache, "_tables", None), "lengths", None)
    return [getattr(cache, name, None) for name in ("sequences", "free_blocks", "lengths")], on_device


def faults_of_wrong_types(public: Public, valid: Callable[[], Arguments]) -> list[str]:
    faults = []
    for what, value in wrong_types(public):
        arguments = valid() | {what: value}
        before = str(state_of(arguments))
        error = outcome(public, arguments)
        if error is None:
            if public.name not in HANDED_ON | CALLED_BY_TRANSFORMERS:
                faults.append(f"{what}={value!r:.30} is taken")
            continue
        if fault := fault_of(public, error, [what]):
            faults.append(f"{what}={value!r:.30}: {fault}")
        if not isinstance(error, (TypeError, ValueError)) and public.name not in CALLED_BY_TRANSFORMERS:
            faults.append(f"{what}={value!r:.30}: {type(error).__name__}")
        if str(state_of(arguments)) != before:
            faults.append(f"{what}={value!r:.30} changes the cache")
    return faults


def faults_of_wrong_values(
    public: Public, valid: Callable[[], Arguments], on: str | None = None
) -> list[str]:
    """`on`: tensors on another device alone."""
    faults, before = [], valid()
    for what, value in wrong_values(valid(), public):
        given = before.get(what)
        if on is not None:
            if not isinstance(given, Tensor):
                continue
            value = given.to(on)
        arguments = valid() | {what: value}
        state = str(state_of(arguments))
        error = outcome(public, arguments)
        fault = ""
        if error is None:
            counts = isinstance(given, Tensor) and given.dtype in (torch.int32, torch.int64)
            counts = counts and isinstance(value, Tensor)
            if counts and value.is_floating_point() and public.name not in LENIENT:
                fault = "is taken"
        elif public.name in HANDED_ON:
            if any(raw in str(error) for raw in RAW) or isinstance(error, AttributeError):
                fault = str(error)
        else:
            fault = fault_of(public, error, described(what, value))
            fault = (
                fault or fault_of_kind(error, given, value) or fault_without_data(public, arguments, error)
            )
            wrote = public.name not in LENIENT and changed(before, arguments, what)
            if wrote or str(state_of(arguments)) != state:
                fault = "changes the cache"
        if fault:
            faults.append(f"{what}={_shown(value)}: {fault}")
    return faults


def changed(before: Arguments, after: Arguments, what: str) -> list[str]:
    """Tensors other than the wrong argument that do not have their values any more."""
    tensors = {name: one for name, one in before.items() if isinstance(one, Tensor) and name != what}
    return [name for name, one in tensors.items() if not same_bits(one, after[name])]


def fault_of_kind(error: Exception, given: Any, value: Any) -> str:
    if isinstance(given, Tensor) and isinstance(value, Tensor) and given.shape == value.shape:
        if given.dtype != value.dtype and not isinstance(error, TypeError):
            return f"{type(error).__name__} for a dtype: {error}"
    return ""


def fault_without_data(public: Public, arguments: Arguments, error: Exception) -> str:
    """torch.compile and export see the same error, word for word."""
    tensors = [one for one in arguments.values() if isinstance(one, Tensor)]
    plain = all(one.device.type == "cpu" and not (one.is_neg() or one.is_inference()) for one in tensors)
    if not plain or not public.name.startswith("fattn."):
        return ""
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(one) if isinstance(one, Tensor) else one for n, one in arguments.items()}
        fake = outcome(public, fakes)
    same = (type(fake), str(fake)) == (type(error), str(error))
    return "" if same else f"without data: {fake!r}, not {error!r}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} on {value.device}"
    return repr(value)[:40]


@pytest.fixture(autouse=True)
def transformers_unchanged() -> Iterator[None]:
    yield
    from torch_fattn.integrations.transformers import unregister

    unregister()
    if dist.is_initialized():
        dist.destroy_process_group()


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "sparse": lambda _: torch.ones(2, 3).to_sparse(),
    "csr": lambda _: torch.ones(2, 3).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t[None], t[None]], layout=torch.jagged),
    "mkldnn": lambda t: t.float().to_mkldnn(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
}


def test_every_public_function_has_a_call_that_works() -> None:
    assert not {*WITH_ARGUMENTS} - VALID.keys() and not LEFT_OUT.keys() - PUBLIC.keys()
    assert not VALID.keys() - PUBLIC.keys(), "these are public no more"


@pytest.mark.host_only
@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa", "ignore:Casting complex values")
@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_a_wrong_type(name: str) -> None:
    public, valid = PUBLIC[name], VALID[name]
    assert outcome(public, valid()) is None, "the control"
    assert not (faults := faults_of_wrong_types(public, valid)), "\n".join(faults)


@pytest.mark.host_only
@pytest.mark.filterwarnings("ignore:.*(prototype|beta|deprecated|quantized)")
@pytest.mark.parametrize("name", [name for name in WITH_ARGUMENTS if name != "torch_fattn.sdpa"])
def test_a_tensor_without_strides(name: str) -> None:
    public, valid = PUBLIC[name], VALID[name]
    faults = []
    for what in [what for what, given in valid().items() if isinstance(given, Tensor)]:
        for kind, made in STRANGE.items():
            arguments = valid()
            arguments[what] = made(arguments[what])
            error = outcome(public, arguments)
            fault = fault_of(public, error, [what, "mask"]) if error is not None else "taken"
            if fault and (fault != "taken" or name.startswith(("fattn.", "torch_fattn.flash"))):
                faults.append(f"{what}, {kind}: {fault}")
    assert not faults, "\n".join(faults)


@pytest.mark.host_only
@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa", "ignore:Casting complex values")
@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_shapes_that_do_not_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a path among the arguments may be written
    assert not (faults := faults_of_wrong_values(PUBLIC[name], VALID[name])), "\n".join(faults)


@pytest.mark.host_only
@pytest.mark.parametrize("name", WITH_ARGUMENTS)
def test_missing_and_unknown_arguments_name_the_function(name: str) -> None:
    public, valid = PUBLIC[name], VALID[name]
    calls = [valid() | {"no_such_argument": 1}]
    for what, parameter in public.parameters.items():
        if parameter.default is parameter.empty and what in valid():
            calls.append({n: value for n, value in valid().items() if n != what})
    for call in calls:
        error = outcome(public, call)
        if error is None and any(p.kind is p.VAR_KEYWORD for p in _signature(public)):
            continue  # hands its keywords on
        own = public.name.rpartition(".")[2]
        by_python = isinstance(error, TypeError) and f"{own}" in str(error).split("(")[0]
        assert by_python or (error is not None and not fault_of(public, error, [""])), repr(error)


def _signature(public: Public) -> Any:
    return inspect.signature(public.function).parameters.values()


@pytest.mark.filterwarnings("ignore:torch_fattn.sdpa", "ignore:Casting complex values")
@pytest.mark.parametrize("name", [n for n in WITH_ARGUMENTS if n not in LENIENT])
def test_a_tensor_on_another_device(name: str) -> None:
    assert not (faults := faults_of_wrong_values(PUBLIC[name], VALID[name], on="mps")), "\n".join(faults)


# ---- controls: each check finds its fault


def raises(message: str) -> Callable[[Any], None]:
    def refuse(scores: Any) -> None:
        if not isinstance(scores, Tensor):
            raise TypeError(message)

    return refuse


TWINS: list[tuple[Callable[..., Any], str]] = [
    (lambda scores: scores.exp(), "AttributeError"),
    (lambda scores: torch.ops.fattn.softmax(scores), "raw: "),
    (raises("scores is of type list; pass a tensor"), "nameless TypeError"),
    (raises("twin: scores is not a tensor\npass one"), "raw: "),
    (raises("twin: something is wrong; pass something else"), "none of ['scores']"),
    (lambda scores: scores, "is taken"),
]


@pytest.mark.host_only
@pytest.mark.parametrize(("does", "message"), TWINS)
def test_a_twin_is_caught(does: Callable[..., Any], message: str) -> None:
    def twin(scores: Tensor) -> Any:
        return does(scores)

    faults = faults_of_wrong_types(Public("twin", twin), lambda: {"scores": torch.ones(2, 3)})
    assert any(message in fault for fault in faults if "[1.5]" in fault), faults


def _takes_float_lengths(seq_lens: Tensor) -> Any:
    return seq_lens.long()


def _leaks_an_inner_call(scores: Tensor, **options: Any) -> Tensor:
    return torch_fattn.softmax.__wrapped__(scores, **options)  # type: ignore[attr-defined]


def _refuses_differently_without_data(query: Tensor) -> None:
    if query.dim() < 2:
        raise ValueError(f"fattn.twin: query of type {type(query).__name__} has rank {query.dim()}")


def _writes_first(key: Tensor, scale: float) -> None:
    key.zero_()
    raise ValueError(f"twin: scale is {scale}")


@pytest.mark.host_only
def test_more_twins() -> None:
    """Float lengths, a keyword of an inner function, an error that differs without data, a tensor or cache
    that a refused call has changed."""
    of_fakes = Public("fattn.twin", _refuses_differently_without_data)
    faults = faults_of_wrong_values(of_fakes, lambda: {"query": torch.ones(2, 3)})
    assert any("without data" in fault for fault in faults)
    faults = faults_of_wrong_values(
        Public("twin", _writes_first), lambda: {"key": torch.ones(2), "scale": 1.0}
    )
    assert any(fault.startswith("scale=nan") and "changes" in fault for fault in faults)
    lengths = Public("twin", _takes_float_lengths)
    faults = faults_of_wrong_values(lengths, lambda: {"seq_lens": torch.ones(2).int()})
    assert "seq_lens=torch.float16 [2] on cpu: is taken" in faults
    error = outcome(Public("twin", _leaks_an_inner_call), {"scores": torch.ones(2, 3), "temperature": 2.0})
    assert "nameless TypeError" in fault_of(Public("twin", _leaks_an_inner_call), error, [""])  # type: ignore[arg-type]

    def grows(self: Any, sequence: int) -> None:
        self.allocate()
        raise TypeError(f"twin: sequence is of type {type(sequence).__name__}; pass a whole number")

    faults = faults_of_wrong_types(Public("twin", grows), VALID["PagedKVCache.free"])
    assert any("changes the cache" in fault for fault in faults)
