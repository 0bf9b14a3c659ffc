"""Every class, selector, property and enum value of softmetal's Metal headers exists in Apple's headers.

The reference is Apple's metal-cpp in the wheel `mlx-metal`: MTLHeaderBridge.hpp has the selectors, the class
headers assign them to classes, and the enums have their values. The test downloads it; it is not in the
repository.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from softmetal.paths import PACKAGE

HEADERS = PACKAGE / "framework" / "include" / "Metal"
REQUIREMENT = "mlx-metal==0.32.4"


@dataclass
class Api:
    selectors: dict[str, set[str]] = field(default_factory=dict)  # class -> selectors
    enums: dict[str, dict[str, int]] = field(default_factory=dict)  # enum -> constant -> value

    def faults(self, truth: Api) -> list[str]:
        found = []
        for name, selectors in self.selectors.items():
            if name not in truth.selectors:
                found.append(f"class {name}")
                continue
            found += [f"-[{name} {selector}]" for selector in selectors - truth.selectors[name]]
        for name, constants in self.enums.items():
            if name not in truth.enums:
                found.append(f"enum {name}")
                continue
            for constant, value in constants.items():
                if truth.enums[name].get(constant) != value:
                    found.append(f"{constant} = {value}, should be {truth.enums[name].get(constant)}")
        return sorted(found)


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def _enum_values(body: str, prefix: str) -> dict[str, int]:
    values: dict[str, int] = {}
    for entry in filter(None, (e.strip() for e in body.split(","))):
        name, _, expression = entry.partition("=")
        if re.fullmatch(r"[\d\s<|()]+", expression):
            values[prefix + name.strip()] = eval(expression)  # digits and shifts only
    return values


def _method_selector(declaration: str) -> str:
    """`(void)setBytes:(const void*)bytes length:(NSUInteger)length` -> `setBytes:length:`."""
    text = re.sub(r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", " ", declaration)  # types
    parts = re.findall(r"(\w+)\s*:", text)
    return "".join(part + ":" for part in parts) if parts else text.split()[0]


def _property_selectors(attributes: str, declaration: str) -> set[str]:
    name = re.findall(r"(\w+)\s*$", declaration)[0]
    getter = re.search(r"getter\s*=\s*(\w+)", attributes)
    selectors = {getter.group(1) if getter else name}
    if "readonly" not in attributes:
        selectors.add(f"set{name[0].upper()}{name[1:]}:")
    return selectors


def stand_in_api(folder: Path) -> Api:
    api = Api()
    for header in sorted(folder.glob("*.h")):
        text = _without_comments(header.read_text())
        for name, body in re.findall(
            r"@(?:protocol|interface)\s+(\w+)[^;{]*?(?=[\n{])(.*?)@end", text, flags=re.S
        ):
            body = re.sub(r"\A\s*\{.*?\}", "", body, flags=re.S)  # instance variables
            selectors = api.selectors.setdefault(name, set())
            for declaration in re.findall(r"^\s*[-+]\s*(.*?);", body, flags=re.S | re.M):
                selectors.add(_method_selector(declaration))
            for attributes, declaration in re.findall(r"@property\s*\(([^)]*)\)\s*(.*?);", body, flags=re.S):
                selectors |= _property_selectors(attributes, declaration)
        for name, body in re.findall(r"NS_(?:ENUM|OPTIONS)\(\w+,\s*(\w+)\)\s*\{(.*?)\}", text, flags=re.S):
            api.enums[name] = _enum_values(body, "")
    return api


def apple_api(folder: Path) -> Api:
    api = Api()
    definitions = (folder / "MTLHeaderBridge.hpp").read_text()
    bridge = dict(re.findall(r'_MTL_PRIVATE_DEF_SEL\((\w+),\s*"([^"]+)"\)', definitions))
    parents: dict[str, str] = {}
    for header in sorted(folder.glob("MTL*.hpp")):
        text = _without_comments(header.read_text())
        for name, parent in re.findall(r"class (\w+) : public NS::\w+<\w+(?:,\s*(?:MTL::)?(\w+))?>", text):
            api.selectors.setdefault(f"MTL{name}", set())
            if parent and parent != name:  # metal-cpp makes one class its own parent
                parents[f"MTL{name}"] = f"MTL{parent}"
        method = r"_MTL_INLINE[^;{]*?MTL::(\w+)::\w+\([^{]*\{(.*?)\n\}"
        for name, body in re.findall(method, text, flags=re.S):
            used = re.findall(r"_MTL_PRIVATE_SEL\((\w+)\)", body)
            api.selectors.setdefault(f"MTL{name}", set()).update(bridge[s] for s in used if s in bridge)
        enum = r"_MTL_(?:ENUM|OPTIONS)\([\w:]+,\s*(\w+)\)\s*\{(.*?)\}"
        for name, body in re.findall(enum, text, flags=re.S):
            api.enums[f"MTL{name}"] = _enum_values(body, "MTL")
    for name in api.selectors:
        ancestor = parents.get(name)
        while ancestor:
            api.selectors[name] |= api.selectors[ancestor]
            ancestor = parents.get(ancestor)
    return api


@pytest.fixture(scope="module")
def truth(unpacked: Callable[[str, str], Path]) -> Api:
    folder = unpacked(REQUIREMENT, "/metal_cpp/Metal/")
    return apple_api(next(folder.rglob("MTLHeaderBridge.hpp")).parent)


def test_stand_in_headers_are_true(truth: Api) -> None:
    ours = stand_in_api(HEADERS)
    classes, selectors, enums = len(ours.selectors), sum(map(len, ours.selectors.values())), len(ours.enums)
    assert classes >= 14 and selectors >= 120 and enums >= 15  # the headers were read
    faults = ours.faults(truth)
    assert faults == []


def test_made_up_api_is_reported(truth: Api, tmp_path: Path) -> None:
    """Control: wrong arity, a wrong class, an extra setter, wrong values and a made-up class are detected."""
    (tmp_path / "Wrong.h").write_text(
        """
        @protocol MTLDevice <NSObject>
        @property(readonly) NSString* name;
        @property(copy) NSString* registryID;
        - (id<MTLBuffer>)newBufferWithLength:(NSUInteger)length;
        - (void)dispatchThreadgroups:(MTLSize)a threadsPerThreadgroup:(MTLSize)b;
        @end
        @protocol MTLWarpDrive <NSObject>
        @end
        typedef NS_ENUM(NSUInteger, MTLDispatchType) {
          MTLDispatchTypeSerial = 0,
          MTLDispatchTypeConcurrent = 2,
          MTLDispatchTypeWild = 3,
        };
        """
    )
    faults = stand_in_api(tmp_path).faults(truth)
    assert faults == [
        "-[MTLDevice dispatchThreadgroups:threadsPerThreadgroup:]",
        "-[MTLDevice newBufferWithLength:]",
        "-[MTLDevice setRegistryID:]",
        "MTLDispatchTypeConcurrent = 2, should be 1",
        "MTLDispatchTypeWild = 3, should be None",
        "class MTLWarpDrive",
    ]
