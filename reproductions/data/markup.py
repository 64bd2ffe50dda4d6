"""XML as elements that know their line, by defusedxml: no document types, so no entities."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax import SAXParseException
from xml.sax.handler import ContentHandler
from xml.sax.xmlreader import Locator

from defusedxml.common import DTDForbidden
from defusedxml.sax import parseString

from dampen.studies.plugins import DamagedData

DEEPEST = 32
"""Elements within elements; annotations have four."""


@dataclass
class Element:
    """One element: its name, the text in it, its children, and the line that it begins on."""

    name: str
    line: int
    text: str = ""
    below: list[Element] = field(default_factory=list)

    def all(self, name: str) -> list[Element]:
        """The children of a name.

        Args:
            name: the tag.
        """
        return [element for element in self.below if element.name == name]

    def one(self, name: str, path: Path) -> Element:
        """The only child of a name, or DamagedData that names file and line.

        Args:
            name: the tag.
            path: the file, for errors.
        """
        found = self.all(name)
        if len(found) != 1:
            problem = f"<{self.name}> has {len(found)} elements <{name}>, expected one"
            raise DamagedData(
                f"{path}, line {self.line}: {problem}. Correct the file or fetch it again."
            )
        return found[0]


class _Tree(ContentHandler):
    """Builds elements while the parser reads; its locator knows the line."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.outside = path, Element("", 0)
        self.stack = [self.outside]

    def setDocumentLocator(self, locator: Locator) -> None:
        self.locator = locator

    def startElement(self, name: str, attrs: object) -> None:
        line = self.locator.getLineNumber() or 0
        if len(self.stack) > DEEPEST:
            raise DamagedData(f"{self.path}, line {line}: elements nest deeper than {DEEPEST}.")
        element = Element(name, line)
        self.stack[-1].below.append(element)
        self.stack.append(element)

    def endElement(self, name: str) -> None:
        self.stack.pop()

    def characters(self, content: str) -> None:
        self.stack[-1].text += content


def parse_xml(content: bytes, path: Path) -> Element:
    """The outermost element. What is broken or dangerous is DamagedData that names the file.

    Args:
        content: the bytes.
        path: where they come from, for errors.
    """
    tree = _Tree(path)
    try:
        parseString(content, tree, forbid_dtd=True)
    except DTDForbidden as error:
        raise DamagedData(
            f"{path}: a document type is not read; it can make a small file huge. Remove it."
        ) from error
    except DamagedData:
        raise
    except (SAXParseException, ValueError) as error:  # ValueError: an encoding that expat lacks
        raise DamagedData(
            f"{path} ({len(content)} bytes) is not XML: {error}. Fetch the file again."
        ) from error
    return tree.outside.below[0]
