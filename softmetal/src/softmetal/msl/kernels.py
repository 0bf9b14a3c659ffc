"""Kernel functions: the sources of their arguments, their exported names, and the entry points that bind
them.

After the definition of every exported kernel, or at its explicit instantiation, the pass inserts an entry
point that fetches the arguments and calls the kernel, and a table of its buffers. exports() ends the
program with the module's table (softmetal/simt/abi.h).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .constants import FunctionConstants
from .lexer import TokenList, TranslationError
from .overloads import resolve
from .qualifiers import host_text
from .structure import Function, Instantiation, Outline
from .threadgroup import bytes_function

# Attribute of a kernel parameter -> its name in the host headers.
THREAD_ATTRIBUTES = {
    "thread_position_in_grid": "ThreadPositionInGrid",
    "threads_per_grid": "ThreadsPerGrid",
    "thread_position_in_threadgroup": "ThreadPositionInThreadgroup",
    "threads_per_threadgroup": "ThreadsPerThreadgroup",
    "dispatch_threads_per_threadgroup": "ThreadsPerThreadgroup",
    "threadgroup_position_in_grid": "ThreadgroupPositionInGrid",
    "threadgroups_per_grid": "ThreadgroupsPerGrid",
    "thread_index_in_threadgroup": "ThreadIndexInThreadgroup",
    "thread_index_in_simdgroup": "ThreadIndexInSimdgroup",
    "simdgroup_index_in_threadgroup": "SimdgroupIndexInThreadgroup",
    "simdgroups_per_threadgroup": "SimdgroupsPerThreadgroup",
    "dispatch_simdgroups_per_threadgroup": "SimdgroupsPerThreadgroup",
    "threads_per_simdgroup": "ThreadsPerSimdgroup",
    "thread_execution_width": "ThreadsPerSimdgroup",
    "thread_index_in_quadgroup": "ThreadIndexInQuadgroup",
    "quadgroup_index_in_threadgroup": "QuadgroupIndexInThreadgroup",
    "quadgroups_per_threadgroup": "QuadgroupsPerThreadgroup",
}
# Unsupported parameters: a kernel with one compiles, but its pipeline is refused.
_UNSUPPORTED_ATTRIBUTES = {"texture", "sampler"}
_UNSUPPORTED_TYPE = re.compile(r"(texture|depth)(1d|2d|3d|cube|_buffer)\w*$|sampler$")


@dataclass
class Parameter:
    name: str
    binding: str  # its source, as host/binding.h names it
    position: int  # its position among all parameters
    slot: str  # buffer or threadgroup index, a constant expression; "" for thread attributes
    gate: str  # name of the [[function_constant]] that enables it, or ""

    @property
    def fetch(self) -> str:
        return f"::softmetal::{self.binding}" + (f"<({self.slot})>" if self.slot else "")

    @property
    def row(self) -> str:
        """Its entry in the table of arguments; {function} is the kernel."""
        if self.binding == "Unsupported":
            return f'{{"{self.name}", SOFTMETAL_ARG_UNSUPPORTED, 0, 1}}'
        kind = f"::softmetal::argument_kind<{self.position}>({{function}})"
        return f'{{"{self.name}", {kind}, {self.slot}, {self.used}}}'

    @property
    def used(self) -> str:
        return f"({self.gate}) ? 1u : 0u" if self.gate else "1u"


@dataclass
class Kernel:
    function: Function
    parameters: list[Parameter]
    host_name: str  # of a kernel that is not a template
    max_threads: str  # an expression, template parameters allowed; "0" if absent


@dataclass
class Export:
    host_name: str
    number: int
    namespace: str
    argument_count: int
    function: str


@dataclass
class KernelPass:
    tokens: TokenList
    outline: Outline
    only: str | None
    kernels: dict[str, Kernel] = field(default_factory=dict)
    exported: list[Export] = field(default_factory=list)

    def run(self) -> None:
        for function in self.outline.functions:
            if function.is_kernel and function.body is not None:
                self.kernels[function.namespace + function.name] = self.read_kernel(function)
            elif function.is_kernel:
                self.blank_keyword(function)
        for kernel in self.kernels.values():
            self.export_plain(kernel)
        for instantiation in self.outline.instantiations:
            self.export_instantiation(instantiation)

    # ---- reading ---------------------------------------------------------------------------------

    def read_kernel(self, function: Function) -> Kernel:
        attributes = self.attributes(function.begin, function.parameters[0])
        self.blank_keyword(function)
        host_name = _string_literal(attributes["host_name"]) if "host_name" in attributes else None
        max_threads = attributes.get("max_total_threads_per_threadgroup", "0")
        parameters = self.read_parameters(function)
        host_name = host_name or function.host_name or function.namespace + function.name
        return Kernel(function, parameters, host_name, max_threads)

    def blank_keyword(self, function: Function) -> None:
        for i in range(function.begin, function.parameters[0]):
            if self.tokens.text(i) == "kernel" and not self.inside_attribute(i):
                self.tokens.blank(i, i + 1)

    def inside_attribute(self, index: int) -> bool:
        i = index
        while i >= 0 and self.tokens.text(i) not in (";", "{", "}"):
            if self.tokens.is_attribute(i):
                return self.tokens.closing(i) > index
            i -= 1
        return False

    def attributes(self, begin: int, end: int) -> dict[str, str]:
        """name -> argument text of every [[name(argument)]] in the range."""
        t, found, i = self.tokens, {}, begin
        while i < end:
            if not t.is_attribute(i):
                i += 1
                continue
            for first, last in t.split(i + 2, t.closing(i) - 1):
                opens = t.text(first + 1) == "("
                found[t.text(first)] = t.join(first + 2, last - 1) if opens else ""
            i = t.closing(i) + 1
        return found

    def read_parameters(self, function: Function) -> list[Parameter]:
        t = self.tokens
        ranges = t.split(function.parameters[0] + 1, function.parameters[1])
        explicit = [self.attributes(*span) for span in ranges]
        taken = [attributes["buffer"] for attributes in explicit if "buffer" in attributes]
        parameters: list[Parameter] = []
        free_slots = 0
        for position, (span, attributes) in enumerate(zip(ranges, explicit, strict=True)):
            parameter = self.read_parameter(function, position, span, attributes)
            if parameter.binding == "Buffer" and not parameter.slot:
                parameter.slot = f"::softmetal::free_slot({free_slots}, {{{', '.join(['~0u', *taken])}}})"
                free_slots += 1
            parameters.append(parameter)
        return parameters

    def read_parameter(
        self, function: Function, position: int, span: tuple[int, int], attributes: dict[str, str]
    ) -> Parameter:
        t, where = self.tokens, self.tokens[span[0]].where
        name, words, is_pointer = self.declarator(span)
        subject = f"parameter '{name}' of kernel '{function.name}'"
        gate = attributes.get("function_constant", "")
        for attribute, binding in THREAD_ATTRIBUTES.items():
            if attribute in attributes:
                return Parameter(name, binding, position, "", gate)
        if _UNSUPPORTED_ATTRIBUTES & attributes.keys() or any(
            _UNSUPPORTED_TYPE.match(word) for word in words
        ):
            return Parameter(name, "Unsupported", position, "", gate)
        if "threadgroup" in attributes or ("threadgroup" in words and is_pointer):
            return Parameter(
                name, "ThreadgroupArgument", position, attributes.get("threadgroup") or "0", gate
            )
        if "buffer" in attributes and "thread" not in words:  # the rules check what an alias hides
            return Parameter(name, "Buffer", position, attributes["buffer"], gate)
        if not is_pointer:
            raise TranslationError(
                where,
                f"{subject} ({t.join(*span)}) is neither a pointer nor a reference, so it needs an attribute "
                "such as [[thread_position_in_grid]]",
            )
        if "thread" in words or not words & {"device", "constant"}:
            raise TranslationError(where, f"{subject} must point to device, constant or threadgroup memory")
        return Parameter(name, "Buffer", position, "", gate)

    def declarator(self, span: tuple[int, int]) -> tuple[str, set[str], bool]:
        """Name, all words, and whether it is a pointer, reference or array."""
        t, i, name, is_pointer, words = self.tokens, span[0], "", False, set()
        while i < span[1]:
            if t.is_attribute(i):
                i = t.closing(i) + 1
                continue
            if t.text(i) == "<":
                i = max(t.closing_angle(i), i) + 1
                continue
            if t.kind(i) == "name":
                name = t.text(i)
                words.add(name)
            is_pointer = is_pointer or t.text(i) in ("*", "&", "[")
            i += 1
        return name, words, is_pointer

    # ---- writing ---------------------------------------------------------------------------------

    def wanted(self, host_name: str) -> bool:
        return self.only is None or re.search(self.only, host_name) is not None

    def export_plain(self, kernel: Kernel) -> None:
        function = kernel.function
        assert function.body is not None
        self.insert_max_threads(kernel)
        self.insert_slot_checks(kernel)
        if not function.is_template and self.wanted(kernel.host_name):
            self.tokens[function.body[1]].after += self.entry(
                kernel, kernel.host_name, _qualified(function, function.name), function.namespace
            )

    def insert_max_threads(self, kernel: Kernel) -> None:
        """[[max_total_threads_per_threadgroup(n)]] may depend on template parameters, so a function
        evaluates it.
        """
        function = kernel.function
        header = (
            host_text(self.tokens, function.template_begin, function.begin) if function.is_template else ""
        )
        begin = function.template_begin if function.is_template else function.begin
        name = f"softmetal_max_threads_{function.name}"
        self.tokens[
            begin
        ].before += f"{header} constexpr uint32_t {name}() {{ return {kernel.max_threads}; }} "

    def insert_slot_checks(self, kernel: Kernel) -> None:
        """Indices are constant expressions, which only the compiler can evaluate."""
        function, checks = kernel.function, ""
        buffers = [p for p in kernel.parameters if p.binding == "Buffer"]
        for i, one in enumerate(buffers):
            reason = f"the buffer index of '{one.name}' in kernel '{function.name}' is above 30, the largest"
            checks += f'static_assert(({one.slot}) < SOFTMETAL_MAX_BUFFERS, "{reason}"); '
            for other in buffers[:i]:
                reason = (
                    f"'{other.name}' and '{one.name}' of kernel '{function.name}' have the same buffer index"
                )
                if not (one.gate and other.gate):
                    checks += f'static_assert(({one.slot}) != ({other.slot}), "{reason}"); '
        for one in (p for p in kernel.parameters if p.binding == "ThreadgroupArgument"):
            subject = f"'{one.name}' in kernel '{function.name}'"
            reason = f"the threadgroup index of {subject} is above 30, the largest"
            checks += f'static_assert(({one.slot}) < SOFTMETAL_MAX_BUFFERS, "{reason}"); '
        for gate in {p.gate for p in kernel.parameters if p.gate}:
            reason = f"'{gate}' must be bool to enable a parameter of kernel '{function.name}'"
            checks += f'static_assert(__is_same(decltype({gate}), const bool), "{reason}"); '
        begin = function.template_begin if function.is_template else function.begin
        self.tokens[begin].before += checks

    def check_gates(self, constants: FunctionConstants) -> None:
        for kernel in self.kernels.values():
            where = self.tokens[kernel.function.parameters[0]].where
            for parameter in kernel.parameters:
                if parameter.gate:
                    subject = f"parameter '{parameter.name}' of kernel '{kernel.function.name}'"
                    constants.check_gate(parameter.gate, where, subject)

    def export_instantiation(self, instantiation: Instantiation) -> None:
        t, begin, end = self.tokens, instantiation.begin, instantiation.end
        attributes = self.attributes(begin, end)
        designator = self.designator(begin + 1, end)
        path = re.sub(r"\s", "", designator.split("<", 1)[0])
        name = resolve(path, instantiation.namespace, self.kernels)
        t.blank(begin, end + 1)
        if not name:
            if "host_name" in attributes:
                raise TranslationError(t[begin].where, f"there is no kernel '{path}' to instantiate")
            return
        host_name = _string_literal(attributes.get("host_name", f'"{designator}"'))
        if self.wanted(host_name):
            kernel = self.kernels[name]
            designator = _qualified(kernel.function, designator)
            t[begin].after += self.entry(kernel, host_name, designator, instantiation.namespace)

    def designator(self, begin: int, end: int) -> str:
        """`f<float, 64>` of an explicit instantiation: the qualified name that is followed by '(' or
        ends the declaration.
        """
        t, i = self.tokens, begin
        while i < end:
            if t.is_attribute(i):
                i = t.closing(i) + 1
            elif t.text(i) == "decltype":
                i = t.closing(i + 1) + 1
            elif t.kind(i) == "name" or t.text(i) == "::":
                start = i
                while (
                    i < end
                    and (t.kind(i) == "name" or t.text(i) == "::")
                    and (i == start or t.text(i) == "::" or t.text(i - 1) == "::")
                ):
                    i += 1
                if t.text(i) == "<":
                    i = t.closing_angle(i) + 1
                if i >= end or t.text(i) == "(":
                    return t.join(start, i)
            else:
                i += 1
        raise TranslationError(t[begin].where, "cannot read this explicit instantiation")

    def entry(self, kernel: Kernel, host_name: str, designator: str, namespace: str) -> str:
        """C++ text, on one line: the entry point, its argument table and its limits."""
        number = len(self.exported)
        function = f"softmetal_function_{number}"
        bindings = "".join(f", {p.fetch}{{}}" for p in kernel.parameters)
        slots = [p for p in kernel.parameters if p.slot or p.binding == "Unsupported"]
        rows = ", ".join(p.row.replace("{function}", function) for p in slots)
        max_threads = _companion(designator, f"softmetal_max_threads_{kernel.function.name}")
        limits = f"{max_threads}(), {_companion(designator, bytes_function(kernel.function))}()"
        self.exported.append(Export(host_name, number, namespace, len(slots), kernel.function.name))
        return (
            f" static constexpr auto {function} = &{designator}; "
            f"static void softmetal_entry_{number}(const softmetal_arguments* arguments) "
            f"{{ ::softmetal::invoke({function}, arguments{bindings}); }} "
            f"static const softmetal_argument softmetal_arguments_{number}[] = {{{rows or '{}'}}}; "
            f"static constexpr uint32_t softmetal_limits_{number}[] = {{{limits}}}; "
        )

    def exports(self, constants: dict[str, list[int]]) -> str:
        """The table of kernels. `constants`: by function name, positions among the function constants."""
        lists, rows = "", ""
        for e in self.exported:
            entry, arguments, limits = (
                f"::{e.namespace}softmetal_{what}_{e.number}" for what in ("entry", "arguments", "limits")
            )
            rows += f'  {{"{e.host_name}", {entry}, {arguments}, {e.argument_count}, '
            used = constants.get(e.function, [])
            positions = ", ".join(map(str, used or [0]))
            lists += f"static const uint32_t softmetal_constants_{e.number}[] = {{{positions}}};\n"
            rows += f"{limits}[0], {limits}[1], {len(used)}, softmetal_constants_{e.number}}},\n"
        return f"{lists}static const softmetal_kernel softmetal_kernels[] = {{\n{rows or '  {}'}}};\n"


def _qualified(function: Function, designator: str) -> str:
    """Returns the designator with its namespace; without it, it could name a library function."""
    is_qualified = "::" in designator.split("<")[0]
    return designator if is_qualified else f"::{function.namespace}{designator}"


def _companion(designator: str, name: str) -> str:
    """a::f<float> -> a::name<float>."""
    qualified, angle, arguments = designator.partition("<")
    scope, separator, _ = qualified.rpartition("::")
    return scope + separator + name + angle + arguments


def _string_literal(text: str) -> str:
    """The value of adjacent string literals."""
    return "".join(re.findall(r'"((?:\\.|[^"\\])*)"', text))
