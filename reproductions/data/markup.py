"""XML as elements that know their line, without what makes XML dangerous: no document types, so no
entities.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from dampen.studies.plugins import DamagedData

DEEPEST = 32
"""Elements within elements; annotations have four."""


@dataclass
class Element:
    """One element: its name, the text in it, what is below it, and the line that it begins on."""

    name: str
    line: int
    text: str = ""
    below: list[Element] = field(default_factory=list)

    def all(self, name: str) -> list[Element]:
        return [element for element in self.below if element.name == name]

    def one(self, name: str, path: Path) -> Element:
        """The only element of this name below, or DamagedData that names file and line."""
        found = self.all(name)
        if len(found) != 1:
            problem = f"<{self.name}> has {len(found)} elements <{name}>, expected one"
            raise DamagedData(
                f"{path}, line {self.line}: {problem}. Correct the file or fetch it again."
            )
        return found[0]


def parse_xml(content: bytes, path: Path) -> Element:
    """The outermost element. A document type, deep nesting or broken markup is DamagedData that
    names file and line.
    """
    parser = expat.ParserCreate()
    outside = Element("", 0)
    stack = [outside]

    def start(name: str, attributes: dict[str, str]) -> None:
        if len(stack) > DEEPEST:
            raise DamagedData(
                f"{path}, line {parser.CurrentLineNumber}: elements nest deeper than {DEEPEST}."
            )
        stack.append(Element(name, parser.CurrentLineNumber))
        stack[-2].below.append(stack[-1])

    def end(name: str) -> None:
        stack.pop()

    def text(data: str) -> None:
        stack[-1].text += data

    def doctype(*_: object) -> None:
        line = parser.CurrentLineNumber
        raise DamagedData(
            f"{path}, line {line}: a document type is not read; it can make a small file huge. "
            "Remove it."
        )

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = text, doctype
    parser.buffer_text = True
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError) as error:
        if isinstance(error, DamagedData):
            raise
        raise DamagedData(
            f"{path} ({len(content)} bytes) is not XML: {error}. Fetch the file again."
        ) from error
    return outside.below[0]
