"""Only `gpulab/_torch_internals.py` uses torch's private API, and torch still has what each of its
entries needs.

The tests use no fixtures from this folder, so that they run with any torch: `pytest --noconftest`
is enough.
"""

import ast
import gc
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

import gpulab
from gpulab import _torch_internals as internals

aten = torch.ops.aten
PACKAGE = Path(gpulab.__file__).parent
FILE = Path(internals.__file__)
FILES = sorted(file for file in PACKAGE.rglob("*.py") if file != FILE)
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="torch was built without CUDA"
)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


# --- no other file uses the private API -----------------------------------------------------------

# Modules and names of torch that have no underscore and are not documented.
UNDOCUMENTED = (
    "torch.multiprocessing.reductions",
    "torch.nn.parameter.is_lazy",
    "torch.nn.utils.stateless",
    "torch.optim.adam",
    "torch.optim.optimizer",
    "torch.utils.flop_counter",
    "torch.utils.weak",
)
# Attributes that have an underscore and do not belong to torch.
ALLOWED = {
    "_asdict": "a documented method of named tuples",
    "_replace": "a documented method of named tuples",
    "os._exit": "a documented function of Python",
    "sys._current_frames": "a documented function of Python",
    "sys._getframe": "a documented function of Python",
    "pool._processes": "loky: the processes of a pool, to end them",
    "process_executor._MAX_MEMORY_LEAK_SIZE": "loky: the leak at which it replaces a process",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_private_module(dotted):
    if not re.fullmatch(r"torch(\.\w+)+", dotted):
        return False
    undocumented = any(f"{dotted}.".startswith(f"{name}.") for name in UNDOCUMENTED)
    return undocumented or any(map(is_private, dotted.split(".")))


def own_names(tree):
    """The private names that a file defines: functions, classes, and attributes of its own
    objects.
    """
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            names.add(node.attr)
    return names


def uses_of_private_api(source):
    """The lines of a source that use torch's private API, as far as the syntax shows."""
    tree = ast.parse(source)
    own = own_names(tree)
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names if names_private_module(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in dotted if names_private_module(name)]
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            allowed = node.attr in ALLOWED or text in ALLOWED or node.attr in own
            owner = ast.unparse(node.value)
            foreign = (
                is_private(node.attr) and owner not in ("self", "cls", "super()") and not allowed
            )
            found = [text] if foreign or names_private_module(text) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
            "delattr",
        ):
            name = ast.unparse(node.args[1]).lstrip("f").strip("'\"")
            found = [ast.unparse(node)] if is_private(name) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [repr(node.value)] if names_private_module(node.value) else []
        yield from (f"line {node.lineno}: {text}" for text in found)


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(PACKAGE)) for file in FILES])
def test_private_api_is_touched_by_no_other_file(file):
    assert list(uses_of_private_api(file.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch._inductor import config",
        "from torch.utils import _pytree",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.utils.stateless import _reparametrize_module",
        "from torch.multiprocessing.reductions import StorageWeakRef",
        "from torch.optim.adam import adam",
        "torch._C._current_autograd_node()",
        "operation._schema.name",
        "self.operation._schema",
        "tensor._version",
        "module._forward_hooks",
        "torch.optim.adam.adam(weights)",
        "getattr(node, '_saved_training', False)",
        "getattr(node, f'_saved_{name}')",
        "hasattr(module, '_orig_mod')",
        "'torch._dynamo' in sys.modules",
    ],
)
def test_uses_of_private_api_are_found(line):
    assert len(list(uses_of_private_api(line))) >= 1


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils.data import DataLoader",
        "from torch.optim import Adam",
        "self._value",
        "sys._getframe()",
        "row._asdict()",
        "tensor.__class__",
        "torch.compiler.reset()",
        "getattr(tensor, 'shape')",
        "class A:\n    def _own(self): ...\nother._own()",
        "'torch._dynamo compiles functions'",
    ],
)
def test_uses_of_private_api_do_not_include_other_code(line):
    assert list(uses_of_private_api(line)) == []


# --- every entry is documented and tested ---------------------------------------------------------


def entries():
    """Yield each public name that the module defines, with its docstring."""
    body = ast.parse(FILE.read_text(encoding="utf-8")).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, text = node.name, ast.get_docstring(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = inspect.cleandoc(following.value.value) if is_text else None
        else:
            continue
        if not name.startswith("_") and name != "Function":
            yield name, text


ENTRIES = dict(entries())


@pytest.mark.parametrize("name", sorted(ENTRIES.keys() - {"Nested", "Span"}))
def test_entry_says_which_torch_it_was_tested_with_and_what_would_break(name):
    version = r"((2\.6 and )?2\.15|2\.11, on CUDA)"
    tested = rf"^Tested with torch {version}\. If torch changes th(is|ese names),(.+\n)*.+\swill\s"
    public = r"^This function uses only torch's public API\."
    assert re.search(rf"{tested}|{public}", ENTRIES[name], re.MULTILINE)


@pytest.mark.parametrize("name", sorted(ENTRIES.keys() - {"Nested", "Span"}))
def test_entry_has_a_test(name):
    source = Path(__file__).read_text(encoding="utf-8")
    assert re.search(rf"(internals\.|import [\w, ]*\b){name}\b", source)


def test_torch_internals_import_no_compiler():
    code = """
import sys, gpulab._torch_internals
assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- operators and their schemas ------------------------------------------------------------------


class Recording(internals.UncompiledDispatchMode):
    """Keeps every operation that is dispatched, with its types and arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.calls.append((operation, types, args))
        return operation(*args, **(kwargs or {}))


def recorded(function, *args):
    with Recording() as mode:
        function(*args)
    return mode.calls


def operations_of(function, *args):
    return [operation for operation, _, _ in recorded(function, *args)]


def test_op_overload_has_the_attributes_in_use():
    (operation,) = operations_of(torch.add, torch.ones(2), torch.ones(2))
    assert isinstance(operation, internals.OpOverload)
    assert operation is aten.add.Tensor
    assert torch.Tag.pointwise in operation.tags
    assert operation.overloadpacket is aten.add
    assert (operation.is_view, aten.view.default.is_view) == (False, True)
    assert operation.name() == "aten::add.Tensor"
    assert torch.equal(aten.matmul.default.decompose(torch.eye(2), torch.eye(2)), torch.eye(2))


def test_to_copy_is_called_by_a_conversion():
    assert operations_of(lambda x: x.double(), torch.ones(2)) == [internals.TO_COPY]


def test_unsafe_view_is_called_by_a_product_with_a_batch():
    assert internals.UNSAFE_VIEW in operations_of(
        torch.matmul, torch.ones(2, 3, 4), torch.ones(4, 5)
    )


def test_fused_lstm_cell_has_the_arguments_in_use():
    forward = internals.fused_lstm_cell.default
    names = ["input_gates", "hidden_gates", "cx", "input_bias", "hidden_bias"]
    assert internals.argument_names(forward) == names
    backward = internals.fused_lstm_cell_backward.default
    assert internals.argument_names(backward) == [
        "grad_hy",
        "grad_cy",
        "cx",
        "cy",
        "workspace",
        "has_bias",
    ]


@needs_cuda
def test_fused_lstm_cell_computes_on_a_gpu():
    gates, cell = torch.zeros(1, 8, device="cuda"), torch.ones(1, 2, device="cuda")
    hidden, after, activated = internals.fused_lstm_cell(gates, gates, cell, None, None)
    assert torch.allclose(after, torch.full_like(cell, 0.5))
    of_gates, of_cell, _ = internals.fused_lstm_cell_backward(
        hidden, cell, cell, after, activated, False
    )
    assert (of_gates.shape, of_cell.shape) == (gates.shape, cell.shape)


def test_operator_module_is_passed_by_operations_that_a_mode_calls():
    class Failing(internals.UncompiledDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            return operation(*args, **(kwargs or {}))

    with pytest.raises(RuntimeError) as caught, Failing():
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    modules = [entry.frame.f_globals["__name__"] for entry in caught.traceback]
    assert modules[-2:] == [__name__, internals.OPERATOR_MODULE]


def test_operation_name_and_schema_name_are_those_of_the_operation():
    assert internals.schema_name(aten.addmm_.default) == "aten::addmm_"
    assert internals.operation_name(aten.addmm_.default) == "addmm"
    assert internals.operation_name(aten._to_copy.default) == "_to_copy"


def test_is_mutable_argument_names_and_result_names_follow_the_schema():
    assert [
        internals.is_mutable(operation) for operation in (aten.add.Tensor, aten.add_.Tensor)
    ] == [False, True]
    assert internals.argument_names(aten.add.Tensor) == ["self", "other", "alpha"]
    assert internals.result_names(aten.linalg_cholesky_ex.default) == ["L", "info"]
    assert internals.named_arguments(aten.add.Tensor, (1,), {"other": 2}) == {
        "self": 1,
        "other": 2,
        "alpha": 1,
    }


def test_returned_or_written_gives_what_is_returned_or_else_written():
    written, kept = [torch.zeros(2)], torch.ones(2)
    zero, ctc = aten._foreach_zero_.default, aten._ctc_loss.default
    assert internals.returned_or_written(zero, (written,), None) == [written]
    assert internals.returned_or_written(aten.add.Tensor, (kept, 1), kept) is kept
    assert internals.returned_or_written(ctc, (), (kept, written)) == (kept,)


def test_has_failed_recognizes_a_failed_factorization():
    operation = aten.linalg_cholesky_ex.default
    found = [
        internals.has_failed(operation, operation(matrix))
        for matrix in (torch.eye(2), -torch.eye(2))
    ]
    assert found == [False, True]


@pytest.mark.parametrize(
    "make",
    [
        torch.empty,
        lambda size: torch.ones(1).new_empty(size),
        lambda size: torch.empty_like(torch.ones(size)),
    ],
)
def test_only_allocates_recognizes_operations_that_make_new_memory(make):
    names = [internals.operation_name(operation) for operation in operations_of(make, 3)]
    assert internals.only_allocates(names[-1])
    assert not internals.only_allocates("zeros")


@pytest.mark.parametrize(
    "overwrite", [lambda x: x.copy_(torch.ones(2)), lambda x: x.fill_(1.0), lambda x: x.zero_()]
)
def test_overwrites_first_argument_recognizes_operations_by_name(overwrite):
    names = [
        internals.operation_name(operation) for operation in operations_of(overwrite, torch.ones(2))
    ]
    assert internals.overwrites_first_argument(names[-1])
    assert not internals.overwrites_first_argument("add")


def test_functional_variant_exists_for_operations_in_place():
    assert internals.functional_variant(aten.add_.Tensor) is aten.add.Tensor
    assert internals.functional_variant(aten.relu_.default) is aten.relu.default
    assert internals.functional_variant(aten.add.Tensor) is None
    assert internals.functional_variant(aten.add.out) is None


def test_is_composite_holds_for_operations_without_a_kernel_of_a_device():
    composite = [
        internals.is_composite(operation) for operation in (aten.linear.default, aten.mm.default)
    ]
    assert composite == [
        aten.linear.default
        not in operations_of(torch.nn.functional.linear, torch.ones(1, 2), torch.ones(1, 2)),
        False,
    ]
    assert internals.is_composite(aten.matmul.default)
    assert not internals.is_composite(aten.silu_backward.default)


def test_call_composite_kernel_calls_other_operations():
    x = torch.eye(3)
    with Recording() as mode:
        product = internals.call_composite_kernel(aten.matmul.default, (x, x), {})
        internals.call_composite_kernel(aten._euclidean_dist.default, (x, x), {}, is_explicit=True)
    names = [internals.operation_name(operation) for operation, _, _ in mode.calls]
    assert torch.equal(product, x)
    assert names.count("mm") == 2


def test_decomposition_of_an_operation_computes_the_same():
    x, y = torch.eye(3), torch.ones(2, 3)
    operation = aten._euclidean_dist.default
    assert torch.allclose(internals.decomposition_of(operation)(x, y), operation(x, y), atol=1e-6)


def test_flop_formulas_count_floating_point_operations():
    product = torch.ones(2, 3) @ torch.ones(3, 4)
    formula = internals.flop_formulas()[aten.mm]
    assert formula(torch.ones(2, 3), torch.ones(3, 4), out_val=product) == 2 * 2 * 3 * 4


# --- dispatch modes -------------------------------------------------------------------------------


def test_uncompiled_dispatch_mode_sees_operations_and_is_not_compiled():
    class Doubling(internals.UncompiledDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            return 2 * operation(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Doubling():
        doubled = x.neg()
    assert torch.equal(doubled, torch.full((2,), -2.0))
    assert inspect.unwrap(Doubling.__torch_dispatch__) is Doubling.__torch_dispatch__
    assert Doubling.__torch_dispatch__._torchdynamo_disable


def test_uncompiled_dispatch_mode_imports_no_compiler():
    code = """
        import sys, torch
        from gpulab._torch_internals import UncompiledDispatchMode, uncompiled

        class Mode(UncompiledDispatchMode):
            @uncompiled
            def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
                return operation(*args, **(kwargs or {}))

        with Mode():
            torch.ones(2).exp()
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], check=True)


def test_dispatch_disabled_hides_operations_from_a_mode():
    def compute():
        with internals.dispatch_disabled():
            torch.ones(2).exp()

    assert recorded(compute) == []


def test_active_dispatch_modes_are_listed_in_order():
    with Recording() as outer, Recording() as inner:
        assert internals.active_dispatch_modes() == [outer, inner]
    assert internals.active_dispatch_modes() == []


def test_has_wrapper_subclass_knows_subclasses_by_their_type():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert internals.has_wrapper_subclass([torch.Tensor, type(nested)])
    assert not internals.has_wrapper_subclass([torch.Tensor, nn.Parameter])


CAN_TELL_OBSERVERS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")


@pytest.mark.parametrize(
    "observer", [Recording(), TorchFunctionMode(), saved_tensors_hooks(lambda x: x, lambda x: x)]
)
def test_has_computation_observers_notices_each_observer(observer):
    assert internals.has_computation_observers() is not CAN_TELL_OBSERVERS
    with observer:
        assert internals.has_computation_observers()
    assert internals.has_computation_observers() is not CAN_TELL_OBSERVERS


def test_without_fused_rnn_splits_recurrent_layers_into_operations():
    layer, x = nn.LSTM(2, 3), torch.ones(4, 1, 2)
    before = torch.backends.mkldnn.is_available(), torch.backends.cudnn.enabled

    def compute():
        with torch.no_grad(), internals.without_fused_rnn():
            layer(x)

    names = [internals.operation_name(operation) for operation in operations_of(compute)]
    assert "mkldnn_rnn_layer" not in names
    assert {"mm", "addmm"} & set(names)
    assert (torch.backends.mkldnn.is_available(), torch.backends.cudnn.enabled) == before


# --- the compiler ---------------------------------------------------------------------------------


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.skipif(
    not hasattr(eval_frame, "_FrameAction"), reason="this torch cannot leave out a function"
)
@pytest.mark.usefixtures("compiler")
def test_uncompiled_functions_are_not_compiled():
    compiled_graphs = []

    def backend(graph, _):
        compiled_graphs.append(graph)
        return graph.forward

    @internals.uncompiled
    def left_out(x):
        return x.sin()

    def function(x):
        return left_out(x.exp()).cos()

    torch.compile(function, backend=backend)(torch.ones(2))
    called = [
        node.target
        for graph in compiled_graphs
        for node in graph.graph.nodes
        if node.op == "call_method"
    ]
    assert called == ["exp", "cos"]


@pytest.mark.usefixtures("compiler")
def test_compiled_graph_count_counts_graphs_until_they_are_forgotten():
    internals.forget_compiled_graphs()
    torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(2))
    assert internals.compiled_graph_count() == 1
    internals.forget_compiled_graphs()
    assert internals.compiled_graph_count() == 0


def test_is_compiler_loaded_notices_a_loaded_compiler():
    code = """
        import torch
        from gpulab._torch_internals import is_compiler_loaded

        assert not is_compiler_loaded()
        torch.compiler.reset()
        assert is_compiler_loaded()
    """
    subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], check=True)


@pytest.mark.usefixtures("compiler")
def test_recompilations_allowed_raises_beyond_the_number():
    doubled = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    with internals.recompilations_allowed(2):
        doubled(torch.ones(2))
        doubled(torch.ones(3))
        with pytest.raises(Exception, match="hit"):
            doubled(torch.ones(4))


def test_uncompiled_random_numbers_can_be_asked_of_the_compiler():
    from torch._inductor import config

    for wanted in (True, False):
        with internals.uncompiled_random_numbers(wanted):
            assert config.fallback_random is wanted
            assert internals.draws_as_uncompiled() is wanted


@pytest.mark.usefixtures("compiler")
def test_compiler_error_is_the_class_of_errors_of_the_compiler():
    def failing(*_):
        raise RuntimeError("not this one")

    with pytest.raises(internals.compiler_error(), match="not this one"):
        torch.compile(lambda x: 2 * x, backend=failing)(torch.ones(2))


@pytest.mark.usefixtures("compiler")
def test_original_module_is_found_behind_a_compiled_one():
    plain = nn.Sequential(nn.Linear(2, 2))
    wrapped, in_place = torch.compile(plain, backend="eager"), nn.Sequential(nn.Linear(2, 2))
    assert not internals.is_compiled(in_place)
    in_place.compile(backend="eager")
    assert internals.original_module(wrapped) is plain
    assert internals.original_module(plain) is plain
    assert [internals.is_compiled(module) for module in (plain, wrapped, in_place)] == [
        False,
        True,
        True,
    ]
    names = [internals.name_as_written(name) for name, _ in wrapped.named_modules()]
    assert names == ["", *(name for name, _ in plain.named_modules())]


def test_replace_call_replaces_the_call_of_a_module():
    module, hooked = nn.Linear(2, 3), []
    module.register_forward_hook(lambda *_: hooked.append(True))

    def twice(x):
        return 2 * internals.call_as_written(module, x)

    x = torch.ones(1, 2)
    expected = 2 * module.forward(x)
    internals.replace_call(module, twice)
    assert torch.equal(module(x), expected)
    assert hooked == [True]


# --- autograd -------------------------------------------------------------------------------------


def test_graph_nodes_of_a_result_are_listed_once():
    weight = torch.ones(2, requires_grad=True)
    shared = weight.exp()
    names = [node.name() for node in internals.graph_nodes((shared * shared).sum())]
    assert sorted(names) == sorted(
        ["SumBackward0", "MulBackward0", "ExpBackward0", "torch::autograd::AccumulateGrad"]
    )


def test_current_node_is_known_and_numbered_while_it_computes():
    seen = {}

    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.exp()

        @staticmethod
        def backward(_, gradient):
            node = internals.current_node()
            seen.update(
                name=node.name(),
                number=internals.node_number(node),
                task=internals.current_backward_pass(),
            )
            internals.call_after_backward(lambda: seen.update(ended=True))
            seen["ended"] = False
            return gradient

    result = Exponential.apply(torch.ones(2, requires_grad=True))
    number = internals.newest_node_number()
    assert internals.node_number(result.grad_fn) == number
    result.sum().backward()
    assert (seen["name"], seen["number"], seen["ended"]) == ("ExponentialBackward", number, True)
    assert seen["task"] >= 0
    assert internals.current_node() is None
    assert internals.current_backward_pass() == -1


def test_saved_tensor_hooks_see_tensors_while_they_are_pushed():
    packed, unpacked = [], []
    internals.push_saved_tensor_hooks(
        lambda x: packed.append(x) or x, lambda x: unpacked.append(x) or x
    )
    try:
        result = torch.ones(2, requires_grad=True).exp()
    finally:
        internals.pop_saved_tensor_hooks()
    torch.ones(2, requires_grad=True).exp()
    result.sum().backward()
    assert (len(packed), len(unpacked)) == (1, 1)


def test_saved_values_have_names():
    a, b = torch.ones(2, requires_grad=True), torch.full((2,), 2.0, requires_grad=True)
    product = a * b
    saved = dict(internals.saved_values(product.grad_fn))
    assert torch.equal(saved["self"], a)
    assert torch.equal(saved["other"], b)
    assert list(internals.saved_values(product.grad_fn, ["nothing"])) == [("nothing", None)]
    assert list(internals.saved_values(None)) == []
    product.sum().backward()
    assert "self" not in dict(internals.saved_values(product.grad_fn))  # it was released


def test_saved_values_of_batch_norm_and_rrelu_are_those_the_guard_looks_for():
    normed = nn.BatchNorm1d(3)(torch.rand(4, 3, requires_grad=True))
    saved = dict(
        internals.saved_values(normed.grad_fn, ["training", "running_mean", "running_var"])
    )
    assert saved["training"] is True
    assert all(isinstance(saved[name], torch.Tensor) for name in ("running_mean", "running_var"))
    randomised = nn.functional.rrelu(torch.rand(3, requires_grad=True), training=True)
    saved = dict(internals.saved_values(randomised.grad_fn, ["training", "noise"]))
    assert saved["training"] is True
    assert isinstance(saved["noise"], torch.Tensor)


def test_is_checkpoint_frame_recognizes_frames_of_a_checkpoint():
    frames = []

    def unpack(x):
        frame = sys._getframe().f_back
        frames.append(internals.is_checkpoint_frame(frame))
        return x

    with saved_tensors_hooks(lambda x: x, unpack):
        torch.ones(2, requires_grad=True).exp().sum().backward()
    assert frames == [False]
    assert not internals.is_checkpoint_frame(None)
    module = types.ModuleType("torch.utils.checkpoint")
    exec("import sys\ndef frame(): return sys._getframe()", module.__dict__)
    assert internals.is_checkpoint_frame(module.frame())
    source = inspect.getsource(torch.utils.checkpoint)
    assert "saved_tensors_hooks" in source  # there it computes forward again


def test_once_differentiable_functions_are_recognized():
    def function(decorate):
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(_, x):
                return 2 * x

            @staticmethod
            @decorate
            def backward(_, gradient):
                return 2 * gradient

        return Doubled.apply(torch.ones(2, requires_grad=True)).grad_fn

    marked = torch.autograd.function.once_differentiable
    assert internals.is_once_differentiable(function(marked))
    assert not internals.is_once_differentiable(function(lambda backward: backward))
    assert not internals.is_once_differentiable(torch.ones(2, requires_grad=True).exp().grad_fn)


def test_leaf_of_a_node_is_found():
    weight = torch.ones(2, requires_grad=True)
    node = weight.exp().grad_fn
    assert internals.leaf_of(node) is None
    assert internals.leaf_of(node.next_functions[0][0]) is weight


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_has_tensor_hooks_notices_hooks_of_a_leaf(kind):
    weight = torch.ones(2, requires_grad=True)
    assert not internals.has_tensor_hooks(weight)
    handle = getattr(weight, kind)(lambda *_: None)
    assert internals.has_tensor_hooks(weight)
    handle.remove()
    assert not internals.has_tensor_hooks(weight)


MODULE_HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.parametrize("kind", MODULE_HOOKS)
def test_has_module_hooks_notices_hooks_of_modules(kind):
    module = nn.Linear(2, 2)
    assert not internals.has_module_hooks(module)
    assert not internals.has_global_module_hooks()
    handle = getattr(module, f"register_{kind}")(lambda *_: None)
    assert internals.has_module_hooks(module)
    handle.remove()
    handle = getattr(nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    assert internals.has_global_module_hooks()
    handle.remove()
    assert not internals.has_module_hooks(module)
    assert not internals.has_global_module_hooks()


def test_optimizer_step_hooks_report_steps_of_every_optimizer():
    weight, seen = torch.ones(2, requires_grad=True), []
    handles = [
        internals.register_optimizer_step_pre_hook(
            lambda optimizer, *_: seen.append(("before", optimizer))
        ),
        internals.register_optimizer_step_post_hook(
            lambda optimizer, *_: seen.append(("after", optimizer))
        ),
    ]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == [("before", optimizer), ("after", optimizer)]


# --- tensors, storages and memory -----------------------------------------------------------------


def test_storage_weak_ref_tells_whether_a_storage_lives():
    tensor = torch.ones(2)
    reference = internals.StorageWeakRef(tensor.untyped_storage())
    assert reference.cdata == internals.storage_identity(tensor[1:].untyped_storage())
    assert internals.storage_identity(torch.ones(2).untyped_storage()) != reference.cdata
    assert not reference.expired()
    del tensor
    assert reference.expired()


def test_storage_alive_finds_a_storage_as_long_as_it_lives():
    tensor = torch.ones(3)
    reference = internals.StorageWeakRef(tensor.untyped_storage())
    storage = internals.storage_alive(reference)
    assert storage.data_ptr() == tensor.data_ptr()
    del tensor, storage
    gc.collect()
    assert internals.storage_alive(reference) is None


def test_report_skipped_frames_reports_frames_that_a_mode_keeps_uncompiled():
    told = []
    undo = internals.report_skipped_frames(lambda: told.append(True))
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    try:
        with Recording():
            compiled(torch.ones(2))
        count = len(told)
        compiled(torch.ones(2))
    finally:
        undo()
    assert count
    assert len(told) == count
    with Recording():
        torch.compile(lambda x: x.cos() + 1, backend="eager")(torch.ones(2))
    assert len(told) == count


def test_weak_tensor_key_dictionary_forgets_tensors_that_are_gone():
    tensor = torch.ones(2)
    table = internals.WeakTensorKeyDictionary({tensor: 1})
    assert table.get(tensor) == 1
    assert table.get(torch.ones(2)) is None
    del tensor
    assert len(table) == 0


def wrapped_by_a_transform():
    wrapped = []
    torch.func.vmap(lambda x: wrapped.append(x) or x)(torch.ones(2, 2))
    return wrapped[0]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_is_plain_holds_for_ordinary_tensors_and_their_memory():
    x = torch.arange(6.0).reshape(2, 3)
    others = [
        x.to_sparse(),
        x.to("meta"),
        wrapped_by_a_transform(),
        torch.nested.nested_tensor([x]),
        1.0,
    ]
    assert internals.is_plain(x)
    assert internals.is_plain(nn.Parameter(x))
    assert not any(map(internals.is_plain, others))
    assert internals.span_of(x[:, 1]) == (x.data_ptr() + 4, x.data_ptr() + 4 + 12 + 4)
    assert all(internals.span_of(other) == (0, 0) for other in (*others, x[:0]))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda x: x, 1),
        (lambda x: x.to_sparse(), 2),
        (lambda x: x.to_sparse_csr(), 3),
        (lambda x: x.to_sparse_csc(), 3),
        (lambda x: x.to_sparse_bsr((1, 1)), 3),
        (lambda x: x.to_sparse_bsc((1, 1)), 3),
        (lambda x: nn.Parameter(x), 1),
        (lambda x: torch.complex(x, x).conj(), 1),
        (lambda x: torch.complex(x, x).conj().imag, 1),
        (lambda x: x.to("meta"), 0),
        (lambda _: wrapped_by_a_transform(), 0),
        (lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged), 2),
    ],
)
def test_component_tensors_are_ordinary_tensors(make, parts):
    found = internals.component_tensors(make(torch.eye(2)))
    plain = [
        part
        for part in found
        if type(part) is torch.Tensor and not part.is_conj() and not part.is_neg()
    ]
    assert len(found) >= parts
    assert len(plain) == len(found)
    assert bool(found) == bool(parts)


def test_component_tensors_of_fake_tensors_are_none():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2)
    assert internals.component_tensors(fake) == []


def test_version_of_and_base_of_follow_writes_and_views():
    x = torch.ones(2, requires_grad=True)
    copied = x.clone()
    part, version = copied[1:], internals.version_of(copied)
    part.add_(1)
    assert internals.version_of(copied) == version + 1
    assert internals.base_of(part) is copied
    assert internals.base_of(copied) is None
    assert [internals.is_view(tensor) for tensor in (part, copied)] == [True, False]


def test_is_zero_tensor_recognizes_zeros_of_forward_mode():
    assert internals.is_zero_tensor(torch._efficientzerotensor(2))
    assert not internals.is_zero_tensor(torch.zeros(2))


# --- nested values --------------------------------------------------------------------------------


def test_tree_flatten_and_tree_unflatten_are_inverse():
    nested = {"a": [torch.ones(2), 1], "b": (2, None)}
    leaves, specification = internals.tree_flatten(nested)
    assert internals.tree_unflatten(leaves, specification) == nested
    assert internals.tree_leaves(nested) == leaves
    assert internals.tree_map(str, [1, (2,)]) == ["1", ("2",)]
    assert internals.tree_map_only(int, str, [1, (2.0,)]) == ["1", (2.0,)]
    assert internals.named_leaves({"a": [1], "b": 2}) == [("['a'][0]", 1), ("['b']", 2)]


def test_map_nested_and_find_tensors_reach_nested_arguments():
    x, y = torch.ones(1), torch.ones(1)
    nested = [x, (1, "text", None), {"y": y}]
    assert internals.find_tensors(nested) == [x, y]
    assert internals.map_nested(type, nested) == [
        torch.Tensor,
        (1, "text", None),
        {"y": torch.Tensor},
    ]


# --- modules and optimizers -----------------------------------------------------------------------


def test_dropout_and_norm_modules_are_bases_of_the_layers_in_use():
    dropouts = (
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
    )
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(layer, internals.DropoutModule) for layer in dropouts)
    assert all(issubclass(layer, internals.BatchNormModule) for layer in norms)
    assert nn.Dropout(0.25).p == 0.25


def test_weight_norm_is_a_function_that_modes_see():
    seen = []

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with Seen():
        layer(torch.ones(1, 2))
    assert internals.weight_norm in seen


def test_reparametrized_module_holds_other_tensors_for_a_while():
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight
    with internals.reparametrized(layer, {"weight": torch.full((1, 2), 3.0)}, tie_weights=True):
        assert layer(torch.ones(1, 2)).item() == 6
    assert layer.weight is before


def test_is_lazy_recognizes_lazy_parameters():
    assert internals.is_lazy(nn.LazyLinear(2).weight)
    assert not internals.is_lazy(nn.Linear(2, 2).weight)


def test_adam_is_that_of_torch():
    weight = torch.tensor([1.0, -2.0])
    parameter = nn.Parameter(weight.clone())
    parameter.grad = torch.tensor([0.5, 0.1])
    torch.optim.Adam([parameter], lr=0.1, fused=True).step()
    moments = [[torch.zeros(2)], [torch.zeros(2)]]
    options = {
        "amsgrad": False,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "maximize": False,
    }
    internals.adam(
        [weight], [parameter.grad], *moments, [], [torch.tensor(0.0)], lr=0.1, fused=True, **options
    )
    assert torch.equal(weight, parameter.detach())


def test_convert_tensors_converts_parameters_and_buffers():
    module = nn.BatchNorm1d(2)
    internals.convert_tensors(module, lambda x: x.double() if x.is_floating_point() else x)
    assert {module.weight.dtype, module.running_mean.dtype} == {torch.float64}
    assert module.num_batches_tracked.dtype == torch.int64


# --- CUDA -----------------------------------------------------------------------------------------


@needs_cuda_build
def test_cuda_functions_in_use_exist():
    from torch.cuda import _gpu_trace

    names = ("_activate_gpu_trace", "_cuda_clearCublasWorkspaces")
    assert all(callable(getattr(torch._C, name)) for name in names)
    assert callable(torch._C._CudaEventBase.query)
    assert callable(torch.cuda.jiterator._create_jit_fn)
    kinds = ("device", "stream", "event")
    assert all(
        callable(getattr(_gpu_trace, f"register_callback_for_{kind}_synchronization"))
        for kind in kinds
    )


@needs_cuda
def test_gpu_wait_callback_reports_waits():
    code = """
        import torch
        from gpulab._torch_internals import is_event_finished, register_gpu_wait_callback

        waits = []
        register_gpu_wait_callback(lambda *_: waits.append(True))
        event = torch.cuda.Event()
        event.record()
        stream = torch.cuda.current_stream()
        for wait in (torch.cuda.synchronize, stream.synchronize, event.synchronize):
            waits.clear()
            wait()
            assert waits
        assert is_event_finished(event)
    """
    subprocess.run([sys.executable, "-c", inspect.cleandoc(code)], check=True)


@needs_cuda
def test_compile_elementwise_kernel_compiles_from_source():
    kernel = internals.compile_elementwise_kernel(
        "template <typename T> T twice(T x) { return 2 * x; }"
    )
    assert torch.equal(kernel(torch.ones(3, device="cuda")).cpu(), torch.full((3,), 2.0))


@needs_cuda
def test_clear_cublas_workspaces_releases_memory():
    x = torch.ones(64, 64, device="cuda")
    torch.mm(x, x)
    before = torch.cuda.memory_allocated()
    internals.clear_cublas_workspaces()
    assert torch.cuda.memory_allocated() < before


def test_written_tensors_are_those_that_an_operation_writes_to():
    x, y = torch.ones(2), torch.ones(2)
    assert internals.written_tensors(aten.add_.Tensor, (x, y), {})[0] is x
    assert internals.written_tensors(aten.add.Tensor, (x, y), {}) == []
    found = internals.written_tensors(aten._foreach_add_.Scalar, ([x, y], 1), {})
    assert [t is other for t, other in zip(found, (x, y), strict=True)] == [True, True]
    norm = (torch.ones(3, 2), None, None, x, y, True, 0.1, 1e-5)
    assert len(internals.written_tensors(aten.native_batch_norm.default, norm, {})) == 2
    assert (
        internals.written_tensors(aten.native_batch_norm.default, (*norm[:5], False, *norm[6:]), {})
        == []
    )


def test_negative_view_shares_its_memory():
    x = torch.tensor([1.0, 2.0])
    view = internals.negative_view(x)
    x[0] = 5.0
    assert view.tolist() == [-5.0, -2.0]


def test_ctc_loss_takes_lengths_as_lists_where_they_are_on_another_device():
    original = torch.ctc_loss
    scores = torch.randn(6, 2, 5).log_softmax(-1)
    targets, lengths = (
        torch.ones(2, 3, dtype=torch.long),
        (torch.tensor([6, 6]), torch.tensor([3, 3])),
    )
    expected = torch.nn.functional.ctc_loss(scores, targets, *lengths)
    with internals.ctc_lengths_as_lists():
        assert torch.ctc_loss is not original
        assert torch.equal(torch.nn.functional.ctc_loss(scores, targets, *lengths), expected)
        meta = torch.nn.functional.ctc_loss(scores.to("meta"), targets.to("meta"), [6, 6], [3, 3])
        assert meta.device.type == "meta"
    assert torch.ctc_loss is original


# --- distributed ----------------------------------------------------------------------------------


def test_request_work_handle_makes_every_collective_asynchronous():
    from torch import distributed  # noqa: F401  # it defines the operations of c10d

    operation = torch.ops.c10d.broadcast_.default
    given = ["tensors", "group", 0, 0, False, 30]
    assert internals.request_work_handle(operation, given, {}) == (
        ["tensors", "group", 0, 0, True, 30],
        {},
    )
    args, kwargs = internals.request_work_handle(operation, given[:4], {"timeout": 30})
    assert args == given[:4]
    assert kwargs == {"async_op": True, "timeout": 30}
    barrier = torch.ops.c10d.monitored_barrier_.default  # it has no handle
    assert internals.request_work_handle(barrier, given[:2], {}) == (given[:2], {})


def test_collectives_have_a_group_of_ranks_and_a_handle_to_wait_for(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    from torch import distributed

    seen = []

    class Watching(internals.UncompiledDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            out = operation(*args, **(kwargs or {}))
            if internals.operation_name(operation) == "allreduce":
                internals.wait_for_collective(out)
                group = internals.argument_names(operation).index("process_group")
                seen.append((internals.process_group_ranks(args[group]), args[0][0].tolist()))
            return out

    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        with Watching():
            distributed.all_reduce(torch.ones(2))
    finally:
        distributed.destroy_process_group()
    assert seen == [([0], [1.0, 1.0])]
