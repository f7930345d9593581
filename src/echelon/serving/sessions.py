"""Graphs in ONNX Runtime: one thread, no waiting in loops, and nothing read but the bytes given.

A graph may be a stranger's. Before ONNX Runtime sees it, it is read as a plain message and refused
where it points outside of itself (weights in other files), repeats or branches (graphs inside of
nodes), brings functions or operators of its own, or has more nodes than any of ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from echelon.errors import DamagedError

if TYPE_CHECKING:
    import onnx

MAX_NODES = 20_000
"""More than any encoder has; a message of 100 MB could hold millions."""
_DOMAINS = frozenset({"", "ai.onnx"})


def is_available() -> bool:
    """Whether graphs can be run here: needs onnxruntime, and onnx to look at them first."""
    return all(importlib.util.find_spec(name) is not None for name in ("onnxruntime", "onnx"))


class OnnxGraph:
    def __init__(self, data: bytes, inputs: tuple[str, ...], path: Path, remedy: str) -> None:
        """data: the graph; inputs: their names; path, remedy: for the error of one that is not"""
        import onnxruntime as ort

        refuse_foreign_graph(data, path, remedy)
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.log_severity_level = 3
        try:
            session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's own have no other root
            raise DamagedError(path, f"no graph that runs here: {error}", remedy) from error
        names = tuple(node.name for node in session.get_inputs())
        if names != inputs or len(session.get_outputs()) != 1:
            what = f"expected the inputs {', '.join(inputs)} and one output, it has {names}"
            raise DamagedError(path, what, remedy)
        self._session, self._inputs, self._path, self._remedy = session, inputs, path, remedy
        self._outputs = [node.name for node in session.get_outputs()]

    def __call__(self, *arrays: NDArray[Any]) -> NDArray[Any]:
        """The output; DamagedError where it cannot be computed."""
        given = dict(zip(self._inputs, arrays, strict=True))
        try:
            outputs = self._session.run(self._outputs, given)
        except Exception as error:  # as above: of a graph that only opens, or other inputs
            raise DamagedError(self._path, f"cannot be computed: {error}", self._remedy) from error
        array: NDArray[Any] = outputs[0]
        return array


def refuse_foreign_graph(data: bytes, path: Path, remedy: str) -> None:
    """Raise where a graph could do anything but compute its outputs from its inputs."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load_model_from_string(data)
    except (DecodeError, ValueError, TypeError) as error:
        raise DamagedError(path, f"no ONNX graph: {error}", remedy) from None
    nodes = model.graph.node
    if len(nodes) > MAX_NODES:
        raise DamagedError(path, f"{len(nodes)} nodes, at most {MAX_NODES} are run", remedy)
    if model.functions:
        raise DamagedError(path, "it brings functions of its own", remedy)
    foreign = sorted({node.domain for node in nodes} - _DOMAINS)
    if foreign:
        raise DamagedError(path, f"operators of {', '.join(foreign)}", remedy)
    for node in nodes:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise DamagedError(path, f"a graph inside of {node.op_type}", remedy)
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            what = f"the weights {tensor.name!r} are in another file"
            raise DamagedError(path, what, remedy)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor that a graph holds."""
    yield from model.graph.initializer
    for sparse in model.graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in model.graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
