"""Pods from a directory of manifests, for nodes without an API server.

`pod_source: manifests:<dir>` serves the demo, tests, Podman and Nomad. The files are written by
people, so what is wrong with them is collected and told, with file and line, when the pod is not
found; it does not stop a pod whose own manifest is fine. No API server has seen them, so what we
read of the pod that is asked for is checked here: a slip must not pass for "no capture wanted".

YAML's aliases make few bytes into a value without end. Foreign values that hold others are
therefore never printed or hashed, only named by their type. YAML is imported when a YAML file is
met.
"""

from __future__ import annotations

import os
import stat

from istio_cni.errors import InvalidParameter, IOFailure, PodLookupFailed, quoted

FILE_MAX_BYTES = 1024 * 1024
LISTED_MAX = 5  # pods or problems named in a message
ENTRIES_MAX = 100_000  # containers, arguments and variables of one pod, each as often as it is met
INTEGER_MAX_CHARS = 100  # 1:1:1:… is a number to base 60, and takes minutes
YAML_SUFFIXES = (".yaml", ".yml")
YAML_LEAKS = (ValueError, LookupError, AttributeError, TypeError, RecursionError)  # 2024-13-01
SUFFIXES = (*YAML_SUFFIXES, ".json")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn, TypeAlias

    import yaml

    Pod: TypeAlias = dict[str, object]
    Key: TypeAlias = tuple[str, str]
    Anchor: TypeAlias = dict[object, yaml.Node]  # says types-PyYAML; it is a name or None


def load_pod(directory: str, namespace: str, name: str, matches: Callable[[Pod], bool]) -> Pod:
    """Find the one pod `namespace`/`name` in the directory for which `matches` holds.

    Files *.yaml, *.yml and *.json count, hidden ones excepted; of these objects of kind Pod, alone,
    one of several documents, or in a List. A pod without namespace is in "default". Raises
    IOFailure for a directory that cannot be read, PodLookupFailed for no pod or more than one,
    InvalidParameter for a pod in which something that we read has not the form it must have.
    """
    found: list[tuple[str, Pod]] = []
    others: list[tuple[Key, str]] = []
    problems: list[str] = []
    for path in _manifest_files(directory):
        for pod in _pods(path, problems):
            key = _key(path, pod, problems)
            if key is None:
                continue
            if key != (namespace, name):
                others.append((key, ""))
            elif not matches(pod):
                others.append((key, " with another uid"))
            else:
                found.append((path, pod))
    wanted = quoted(f"{namespace}/{name}")
    if not found:
        raise _not_found(wanted, directory, others, problems)
    if len(found) > 1:
        files = " and ".join(sorted({quoted(path) for path, _ in found}))
        hint = "leave one of them, or give each its metadata.uid"
        raise PodLookupFailed(f"pod {wanted} is described more than once, in {files}; {hint}")
    path, pod = found[0]
    _Check(f"{quoted(path)}: pod {wanted}").pod(pod)
    return pod


def _manifest_files(directory: str) -> list[str]:
    """List the manifests, sorted; a link counts as its target, as ConfigMap volumes need."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        hint = "pod_source must be manifests:DIR, a directory of pod manifests that root can read"
        where = quoted(directory)
        msg = f"cannot read the manifest directory {where}: {error.strerror}; {hint}"
        raise IOFailure(msg) from error
    visible = (name for name in names if name.endswith(SUFFIXES) and name[0] != ".")
    paths = [os.path.join(directory, name) for name in visible]
    # no directories and no FIFOs; what leads nowhere is a problem to tell of
    return [path for path in paths if os.path.isfile(path) or not os.path.exists(path)]


def _pods(path: str, problems: list[str]) -> Iterator[Pod]:
    """Yield the pods of one file, as far as it can be read; the rest goes into `problems`."""
    try:
        content = _read(path)
    except OSError as error:
        problems.append(f"{quoted(path)}: {error.strerror}")
        return
    if content is None:
        problems.append(f"{quoted(path)}: larger than 1 MiB, not read")
        return
    documents = _yaml_documents if path.endswith(YAML_SUFFIXES) else _json_document
    for document in documents(path, content, problems):
        if isinstance(document, dict):
            yield from _pods_of(document)
        elif document is not None:  # None: an empty document between two `---`
            problems.append(f"{quoted(path)}: holds a document that is no object")


def _read(path: str) -> bytes | None:
    """Read a file without ever waiting for it; None if it is too large."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "not a regular file")
        if status.st_size > FILE_MAX_BYTES:
            return None
        content = stream.read(FILE_MAX_BYTES + 1)
    return content if len(content) <= FILE_MAX_BYTES else None


def _pods_of(document: dict[str, object]) -> Iterator[Pod]:
    """Yield the document itself if it is a pod, or the pods of a List."""
    items = document.get("items") if document.get("kind") == "List" else [document]
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("kind") == "Pod":
            yield item


def _json_document(path: str, content: bytes, problems: list[str]) -> Iterator[object]:
    """Yield the one document of a JSON file."""
    import json

    try:
        yield json.loads(content, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        problems.append(f"{quoted(path)} line {error.lineno}: not JSON: {error.msg}")
    except (ValueError, RecursionError) as error:  # no UTF-8, a number of thousands of digits
        problems.append(f"{quoted(path)}: not JSON: {quoted(str(error))}")


def _yaml_documents(path: str, content: bytes, problems: list[str]) -> Iterator[object]:
    """Yield the documents of a YAML file, up to the first that is malformed."""
    import yaml  # manifests that are not JSON

    try:
        yield from yaml.load_all(content, _loader())  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        problems.append(f"{quoted(path)}{line}: not YAML: {quoted(error.problem)}")
    except (yaml.YAMLError, *YAML_LEAKS) as error:
        problems.append(f"{quoted(path)}: not YAML: {quoted(str(error))}")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make an object of JSON, unless a key is in it twice: nobody can tell which one is meant."""
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key} is there twice")
        made[key] = value
    return made


def _loader() -> type[yaml.SafeLoader]:
    """Make a loader that refuses a key twice, and what takes time out of proportion to the file."""
    import yaml  # manifests that are not JSON

    class Loader(yaml.SafeLoader):
        """A SafeLoader with limits."""

        merged = 0

        def compose_mapping_node(self, anchor: Anchor) -> yaml.MappingNode:
            """Refuse a key that is there twice, before merging (<<) brings in others' keys."""
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in seen:
                        refuse(key, f"the key {key.value} is there twice")
                    seen.add((key.tag, key.value))
            return node

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Bound what merging makes: every key is counted as often as it is copied."""
            self.merged += len(node.value)
            if self.merged > FILE_MAX_BYTES:  # a file has fewer keys than bytes
                refuse(node, "merging (<<) makes it too large")
            super().flatten_mapping(node)

        def construct_integer(self, node: yaml.ScalarNode) -> int:
            """Bound the length of numbers."""
            if len(node.value) > INTEGER_MAX_CHARS:
                refuse(node, "a number is too long")
            return super().construct_yaml_int(node)

    def refuse(node: yaml.Node, problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_integer)
    return Loader


def _key(path: str, pod: Pod, problems: list[str]) -> Key | None:
    """Return namespace and name under which a pod is known here; None, and a problem, for none."""
    metadata = pod.get("metadata")
    if metadata is None:
        return "default", "(no name)"
    if not isinstance(metadata, dict):
        place, value, expected = "metadata", metadata, "a mapping"
    else:
        namespace = metadata.get("namespace") or "default"
        name = metadata.get("name") or "(no name)"
        if isinstance(namespace, str) and isinstance(name, str):
            return namespace, name
        field, value = ("name", name) if isinstance(namespace, str) else ("namespace", namespace)
        place, expected = f"metadata.{field}", "a string"
    problem = f"{quoted(path)}: a pod's {place} is of type {type(value).__name__}, not {expected}"
    if problem not in problems:
        problems.append(problem)
    return None


def _not_found(
    wanted: str, directory: str, others: list[tuple[Key, str]], problems: list[str]
) -> PodLookupFailed:
    """Say where was looked, what is there, and what could not be read."""
    listed = [quoted("/".join(key) + more) for key, more in others[:LISTED_MAX]]
    holds = _listed(listed, len(others)) if others else "no pod"
    msg = f"no manifest of pod {wanted} in {quoted(directory)}, which holds {holds}"
    if problems:
        msg += f"; files with problems: {_listed(problems, len(problems))}"
    hint = "add a *.yaml, *.yml or *.json file with this pod, or correct its name or uid"
    return PodLookupFailed(f"{msg}; {hint}")


def _listed(items: list[str], total: int) -> str:
    """Join the first few of so many items and say how many more there are."""
    more = total - LISTED_MAX
    return ", ".join(items[:LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


class _Check:
    """Refuses a pod whose form the API server would refuse, as far as we read it.

    `where` names file and pod, for messages.
    """

    __slots__ = ("entries", "where")

    def __init__(self, where: str) -> None:
        self.where = where
        self.entries = 0

    def pod(self, pod: Pod) -> None:
        """Refuse a pod that is not in form. Raises InvalidParameter."""
        metadata = self.mapping("metadata", pod.get("metadata"))
        for field in ("labels", "annotations"):
            if field in metadata:
                self.strings(f"metadata.{field}", metadata[field])
        spec = self.mapping("spec", pod.get("spec"))
        if "hostNetwork" in spec and not isinstance(spec["hostNetwork"], bool):
            self.refuse("spec.hostNetwork", spec["hostNetwork"], "true or false")
        for field in ("initContainers", "containers"):
            if field in spec or field == "containers":
                for place, container in self.items(f"spec.{field}", spec.get(field)):
                    self.container(place, self.named(place, container))

    def container(self, place: str, container: Pod) -> None:
        """Refuse a container whose arguments, environment or ids are not in form."""
        if "args" in container:
            for at, word in self.items(f"{place}.args", container["args"]):
                self.string(at, word)
        if "env" in container:
            for at, variable in self.items(f"{place}.env", container["env"]):
                value = self.named(at, variable).get("value")
                if isinstance(value, (list, dict, set)):
                    self.refuse(f"{at}.value", value, "a string")
        if "securityContext" in container:
            security = self.mapping(f"{place}.securityContext", container["securityContext"])
            for field in ("runAsUser", "runAsGroup"):
                value = security.get(field, 0)
                if not isinstance(value, int) or isinstance(value, bool):
                    self.refuse(f"{place}.securityContext.{field}", value, "an integer")

    def strings(self, place: str, value: object) -> None:
        """Refuse what is no mapping of strings, as YAML's true, 1 and yes are none."""
        for key, text in self.mapping(place, value).items():
            at = f"{place} {_shown(key)}"
            if not isinstance(key, str):
                self.refuse(f"{at}: the key", key, "a string")
            self.string(at, text)

    def named(self, place: str, value: object) -> Pod:
        """Return a mapping with a name."""
        mapping = self.mapping(place, value)
        self.string(f"{place}.name", mapping.get("name"))
        return mapping

    def mapping(self, place: str, value: object) -> Pod:
        """Return a mapping."""
        if not isinstance(value, dict):
            self.refuse(place, value, "a mapping")
        return value

    def items(self, place: str, value: object) -> Iterator[tuple[str, object]]:
        """Return the places and values of a list, as long as a pod's lists may be."""
        if not isinstance(value, list):
            self.refuse(place, value, "a list")
        self.entries += len(value)
        if self.entries > ENTRIES_MAX:
            self.refuse(place, value, f"a pod of at most {ENTRIES_MAX} entries")
        return ((f"{place}[{index}]", item) for index, item in enumerate(value))

    def string(self, place: str, value: object) -> None:
        """Refuse what is no string."""
        if not isinstance(value, str):
            self.refuse(place, value, "a string")

    def refuse(self, place: str, value: object, expected: str) -> NoReturn:
        """Say what is wrong at a place, what is expected there, and how to mend it."""
        if value is None:
            empty = {"a string": '""', "a mapping": "{}", "a list": "[]"}.get(expected, "one")
            problem = f"has no value; expected is {expected}: write {empty} or remove it"
        else:
            scalar = isinstance(value, (str, int, float))
            problem = f"is of type {type(value).__name__}" + (
                f", {quoted(value)}" if scalar else ""
            )
            problem += f"; expected is {expected}"
            if scalar and expected == "a string":
                problem += f': put it in quotes, as in "{quoted(value)}"'
        raise InvalidParameter(f"{self.where}: {place} {problem}")


def _shown(key: object) -> str:
    """Show a key of a mapping; what is neither text nor a plain number by its type only."""
    return quoted(key) if isinstance(key, (str, int, float)) else f"({type(key).__name__})"
