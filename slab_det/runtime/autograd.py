"""What autograd does not tell through its public interface."""

import torch


def is_recomputing() -> bool:
    """Whether this forward runs inside a backward: activation checkpointing is recomputing its activations.

    Something that counts or collects once per forward asks this to count checkpointed layers once. It is true under
    reentrant and non-reentrant checkpointing. In a traced or compiled forward, which has no Python code left that
    could count, it is false.
    """
    if torch.compiler.is_compiling():
        return False
    # Private, so it may go: then recomputed forwards look like any other. -1 stands for "no backward in this thread".
    graph_task_id = getattr(torch._C, '_current_graph_task_id', None)
    return graph_task_id is not None and graph_task_id() != -1


def graph_position() -> int:
    """A number that grows with every node that this thread adds to the graph of autograd."""
    # Private, as what follows: without it recomputed forwards cannot be told from each other.
    return getattr(torch.autograd, '_get_sequence_nr', lambda: 0)()


def recomputed_graph_position() -> int | None:
    """Where in the graph a forward stands that activation checkpointing recomputes now; None if it recomputes none.

    It is not below the :func:`graph_position` from before that forward, and below that from after it, unless
    :func:`is_recomputed_twice`.
    """
    if not is_recomputing():
        return None
    # The node whose backward asks for the activations was made by the forward itself.
    node = getattr(torch._C, '_current_autograd_node', lambda: None)()
    return getattr(node, '_sequence_nr', lambda: None)()


def is_recomputed_twice() -> bool:
    """Whether the forward that reentrant checkpointing recomputes now is inside another checkpoint.

    What that one recomputes later stands in the graph of this backward pass, and no longer in that of the forward.
    """
    node = getattr(torch._C, '_current_autograd_node', lambda: None)()
    if type(node).__name__ != 'CheckpointFunctionBackward':
        return False
    # Of the inner one: reentrant ones run without gradient, others under hooks on saved tensors.
    hooks = getattr(torch._C._autograd, '_top_saved_tensors_default_hooks', lambda ignore_is_tracing: None)
    return not torch.is_grad_enabled() or hooks(True) is not None
