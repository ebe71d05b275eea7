"""What a captured CUDA graph consists of: nodes of each kind, edges, and how many kernels may run side by side."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kda_lib.launch import check

if TYPE_CHECKING:
    import torch

_PREFIX = "CU_GRAPH_NODE_TYPE_"


@dataclass(frozen=True)
class NodeCounts:
    """events: record and wait nodes; a fork or join inside a capture is edges, not nodes. programmatic: edges made by
    programmatic dependent launch, part of ``edges``. other: nodes of any other kind (memcpy, host, allocation, ...).
    """

    kernels: int
    memsets: int
    events: int
    other: int
    edges: int
    programmatic: int


@dataclass(frozen=True)
class Topology:
    """kinds: of each node, CUDA's name in lower case, e.g. ``"kernel"``. edges: pairs of node indices, from and to."""

    kinds: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]
    programmatic: int = 0


def topology(graph: torch.cuda.CUDAGraph) -> Topology:
    """Read a graph that was captured with ``keep_graph=True``.

    Raises:
        RuntimeError: the graph was not kept (torch's own error).
        launch.CudaError: the driver refused.
    """
    from cuda.bindings import driver

    handle = driver.CUgraph(graph.raw_cuda_graph())
    # cuda-bindings 12 has a first version that refuses graphs with programmatic edges.
    get_edges = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)
    _, count = check("cuGraphGetNodes", driver.cuGraphGetNodes(handle))
    nodes, _ = check("cuGraphGetNodes", driver.cuGraphGetNodes(handle, count))
    *_, edge_count = check("cuGraphGetEdges", get_edges(handle))
    sources, targets, data, _ = check("cuGraphGetEdges", get_edges(handle, edge_count))
    index = {int(node): i for i, node in enumerate(nodes[:count])}
    programmatic = int(driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return Topology(
        kinds=tuple(
            check("cuGraphNodeGetType", driver.cuGraphNodeGetType(node)).name.removeprefix(_PREFIX).lower()
            for node in nodes[:count]
        ),
        edges=tuple((index[int(a)], index[int(b)]) for a, b in zip(sources, targets, strict=True)),
        programmatic=sum(int(edge.type) == programmatic for edge in data),
    )


def node_counts(graph: Topology) -> NodeCounts:
    """How many nodes of each kind and how many edges."""
    kinds = Counter(graph.kinds)
    kernels, memsets = kinds["kernel"], kinds["memset"]
    events = kinds["event_record"] + kinds["wait_event"]
    other = len(graph.kinds) - kernels - memsets - events
    return NodeCounts(kernels, memsets, events, other, len(graph.edges), graph.programmatic)


def lanes(graph: Topology) -> int:
    """The most kernels of which none has to wait for another: the largest antichain of the graph's order.

    By Dilworth's theorem that is the least number of chains that cover all kernels, here found as a maximum matching of
    the transitive closure. A sequence has 1 lane; forked and joined layers in sequence have 2, however many they are.

    Raises:
        ValueError: the edges form a cycle.
    """
    import networkx as nx

    order = nx.DiGraph()
    order.add_nodes_from(range(len(graph.kinds)))
    order.add_edges_from(graph.edges)
    if not nx.is_directed_acyclic_graph(order):
        raise ValueError("graph: expected a directed acyclic graph, got a cycle; read it with topology()")
    kernels = [i for i, kind in enumerate(graph.kinds) if kind == "kernel"]
    chosen = set(kernels)
    pairs = nx.Graph()
    before = [("before", i) for i in kernels]
    pairs.add_nodes_from(before)
    pairs.add_nodes_from(("after", i) for i in kernels)
    pairs.add_edges_from(
        (("before", a), ("after", b)) for a, b in nx.transitive_closure_dag(order).edges if {a, b} <= chosen
    )
    matching = nx.bipartite.hopcroft_karp_matching(pairs, top_nodes=before)
    return len(kernels) - len(matching) // 2
