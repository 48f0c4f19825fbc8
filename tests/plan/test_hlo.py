"""The parser of collectives in HLO text; whole steps are counted in `test_axes`."""

import pytest

from runner.plan.forecast.collectives import Collective, find_collectives
from runner.plan.forecast.module import Buffer, find_largest_arrays

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
AXES = tuple(MESH)
FIVE_AXES = {"data": 1, "fsdp": 2, "sequence": 4, "expert": 2, "tensor": 2}
ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %sum = f32[] add(%a, %b)\n}\n"


def make_module(*lines, before="", partitions=8):
    """Make a module whose entry computation has the given instructions."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule jit_step, is_scheduled=true, num_partitions={partitions}\n\n{ADD}\n{before}\n"
        f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


def parse_only_collective(*lines, mesh=MESH, **kwargs):
    """Return the only collective of a module with the given instructions."""
    (found,) = find_collectives(make_module(*lines, **kwargs), mesh)
    return found


def make_all_reduce(groups, attributes="channel_id=1, use_global_device_ids=true"):
    return f"%r = f32[8,16]{{1,0}} all-reduce(%p), replica_groups={groups}, {attributes}, to_apply=%add"


# Groups.


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("{{0,2},{4,6},{1,3},{5,7}}", ("fsdp",), 2),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "fsdp"), 4),
        ("{{0,1,2,3,4,5,6,7}}", AXES, 8),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
        ("{}", AXES, 8),
        ("[1,8]<=[8]", AXES, 8),
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",), 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("mesh['axis_0'=8] {'axis_0'}", AXES, 8),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_2'}", ("tensor",), 2),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0','axis_1'}", ("data", "fsdp"), 4),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_0'}", ("fsdp",), 2),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=(0,1,4,5,2,3,6,7) {'axis_0'}", ("fsdp",), 2),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ("fsdp",), 2),
        ("mesh['axis_0'=8] {'axis_0':(1)4}", ("data", "fsdp"), 4),
        ("mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(4)2}", ("data", "tensor"), 4),
        ("mesh['axis_0'=8]", (), 1),
    ],
)
def test_every_form_of_replica_groups_maps_to_its_axes(groups, axes, size):
    found = parse_only_collective(make_all_reduce(groups))
    assert (found.axes, found.group_size) == (axes, size)


def test_irregular_groups_map_to_the_fewest_axes_that_contain_them():
    halves = parse_only_collective(make_all_reduce("{{0,1,2,3},{4,5,6,7}}"), mesh={"data": 1, "fsdp": 1, "tensor": 8})
    assert (halves.axes, halves.group_size) == (("tensor",), 4)
    diagonal = parse_only_collective(make_all_reduce("{{0,3},{1,2},{4,7},{5,6}}"))
    assert (diagonal.axes, diagonal.group_size) == (("fsdp", "tensor"), 2)
    uneven = parse_only_collective(make_all_reduce("{{0,1,2},{3},{4,5},{6,7}}"))
    assert (uneven.axes, uneven.group_size) == (("fsdp", "tensor"), 3)


def test_replica_groups_with_a_channel_include_all_partitions():
    assert parse_only_collective(make_all_reduce("{{0}}", "channel_id=1")).axes == AXES
    assert parse_only_collective(make_all_reduce("{{0}}", "foo=1")).axes == ()


def test_a_mesh_with_too_few_devices_is_rejected():
    with pytest.raises(ValueError, match=r"all-reduce r: .* names device 7, but the mesh \{'data': 4\} has 4"):
        parse_only_collective(make_all_reduce("{{0,1,2,3,4,5,6,7}}"), mesh={"data": 4})


def test_an_unknown_form_of_groups_is_rejected():
    with pytest.raises(ValueError, match="replica groups of an unknown form"):
        parse_only_collective(make_all_reduce("@grid<4>"))


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("[16,2]<=[32]", ("tensor",), 2),
        ("[16,2]<=[8,2,2]T(0,2,1)", ("expert",), 2),
        ("[8,4]<=[2,4,4]T(0,2,1)", ("sequence",), 4),
        ("[4,8]<=[2,4,4]T(2,0,1)", ("fsdp", "sequence"), 8),
        ("[2,16]<=[16,2]T(1,0)", ("fsdp", "sequence", "expert"), 16),
        ("[4,8]<=[2,4,2,2]T(0,2,1,3)", ("sequence", "tensor"), 8),
        ("mesh['axis_0'=2,'axis_1'=4,'axis_2'=2,'axis_3'=2] {'axis_1'}", ("sequence",), 4),
    ],
)
def test_groups_on_a_mesh_of_five_axes_map_to_their_axes(groups, axes, size):
    found = parse_only_collective(make_all_reduce(groups), mesh=FIVE_AXES, partitions=32)
    assert (found.axes, found.group_size) == (axes, size)


# Kinds and sizes.

GROUPS = "channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true"


@pytest.mark.parametrize(
    ("line", "kind", "size", "sent"),
    [
        (f"f32[8,16]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}", "all-gather", 512, 256),
        (
            f"f32[8,16]{{1,0}} reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add",
            "reduce-scatter",
            1024,
            512,
        ),
        (f"f32[8,16]{{1,0}} all-reduce(%p), {GROUPS}, to_apply=%add", "all-reduce", 512, 512),
        (f"(f32[4], /*index=1*/bf16[4,2]{{1,0}}, f32[]) all-reduce(%p, %q, %r), {GROUPS}", "all-reduce", 36, 36),
        (f"f32[8,16]{{1,0}} all-to-all(%p), {GROUPS}, dimensions={{0}}", "all-to-all", 512, 256),
        (f"(f32[4,16]{{1,0}}, f32[4,16]{{1,0}}) all-to-all(%p, %q), {GROUPS}", "all-to-all", 512, 256),
        (f"f32[8]{{0}} collective-broadcast(%p), {GROUPS}", "collective-broadcast", 32, 16),
        (f"f32[8]{{0}} ragged-all-to-all(%a, %b, %c, %d, %e, %f), {GROUPS}", "ragged-all-to-all", 32, 16),
        (f"(f32[4,16], f32[8,16]{{1,0}}) all-gather-start(%p), {GROUPS}, dimensions={{0}}", "all-gather", 512, 256),
        (f"((f32[2], f32[3]), (f32[4], f32[6])) all-gather-start(%p, %q), {GROUPS}", "all-gather", 40, 20),
        (f"f32[8]{{0}} all-reduce-start(%p), {GROUPS}, to_apply=%add", "all-reduce", 32, 32),
        (f"(f32[8]{{0}}, f32[]) all-reduce-start(%p, %q), {GROUPS}, to_apply=%add", "all-reduce", 36, 36),
        (f"((f32[8]{{0}}), f32[4]{{0}}, u32[]) reduce-scatter-start(%p), {GROUPS}", "reduce-scatter", 32, 16),
        (f"((f32[8]{{0}}), f32[8]{{0}}, s32[]) all-to-all-start(%p), {GROUPS}", "all-to-all", 32, 16),
        (f"f32[8] all-reduce(f32[8]{{0:T(8,128)}} %p), {GROUPS}, to_apply=%add", "all-reduce", 32, 32),
    ],
)
def test_every_kind_of_collective_has_its_size_and_sent_bytes(line, kind, size, sent):
    found = parse_only_collective(
        f"%x = {line}", "%y = f32[8]{0} all-gather-done(%x)", "%z = f32[8]{0} all-reduce-done(%x)"
    )
    assert (found.kind, found.bytes, found.sent_bytes_per_device, found.count) == (kind, size, sent, 1)
    assert (found.axes, found.group_size) == (("tensor",), 2)


@pytest.mark.parametrize(
    ("pairs", "axes", "size", "sent"),
    [
        ("{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}", ("tensor",), 2, 32),
        ("{{0,2},{2,4},{4,6},{6,0}}", ("data", "fsdp"), 4, 32),
        ("{{0,0},{1,1}}", (), 1, 0),
        ("{}", (), 1, 0),
    ],
)
def test_a_permute_sends_along_the_axes_in_which_its_pairs_differ(pairs, axes, size, sent):
    line = "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), channel_id=1"
    found = parse_only_collective(
        f"%x = {line}, source_target_pairs={pairs}", "%y = f32[8]{0} collective-permute-done(%x)"
    )
    assert (found.axes, found.group_size, found.bytes, found.sent_bytes_per_device) == (axes, size, 32, sent)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048),
        ("pred[7]", 7),
        ("s4[3]", 2),
        ("u4[4]{0:E(4)}", 2),
        ("f8e4m3fn[8]", 8),
        ("f8e5m2fnuz[8]", 8),
        ("f8e8m0fnu[8]", 8),
        ("f4e2m1fn[8]", 4),
        ("c64[2]", 16),
        ("c128[2]", 32),
        ("u64[]", 8),
        ("f32[<=8,2]", 64),
        ("f32[0,8]", 0),
    ],
)
def test_every_element_type_has_its_size(shape, size):
    assert parse_only_collective(f"%x = {shape} all-gather(%p), {GROUPS}").bytes == size


EXPERT_MODULE = "channel_id=1, replica_groups=[16,2]<=[8,2,2]T(0,2,1), use_global_device_ids=true"


@pytest.mark.parametrize(
    ("line", "kind", "size"),
    [
        (f"(f32[4,16]{{1,0}}, f32[4,16]{{1,0}}) all-to-all(%p, %q), {EXPERT_MODULE}", "all-to-all", 512),
        (f"bf16[2,8,16]{{2,1,0}} all-to-all(%p), {EXPERT_MODULE}, dimensions={{0}}", "all-to-all", 512),
        (f"bf16[16,16]{{1,0}} ragged-all-to-all(%a, %b, %c, %d, %e, %f), {EXPERT_MODULE}", "ragged-all-to-all", 512),
        (
            f"((bf16[16,16]), bf16[16,16]) ragged-all-to-all-start(%a), {EXPERT_MODULE}",
            "ragged-all-to-all",
            512,
        ),
    ],
)
def test_all_to_all_over_two_devices_sends_half_of_the_tokens(line, kind, size):
    found = parse_only_collective(f"%x = {line}", mesh=FIVE_AXES, partitions=32)
    assert (found.kind, found.axes, found.group_size, found.bytes) == (kind, ("expert",), 2, size)
    assert found.sent_bytes_per_device == size // 2


def make_sequence_ring():
    """Return the pairs of a ring along `sequence` of `FIVE_AXES`: neighbours are 4 apart, 4 devices per ring."""
    rings = [[block * 16 + place * 4 + rest for place in range(4)] for block in range(2) for rest in range(4)]
    pairs = [(source, ring[(at + 1) % 4]) for ring in rings for at, source in enumerate(ring)]
    return "{" + ",".join(f"{{{source},{target}}}" for source, target in pairs) + "}"


def test_ring_attention_takes_one_hop_less_than_its_devices():
    lines, before = make_loop(0, 1, 3, "LT")
    hop = f"collective-permute(%p), channel_id=4, source_target_pairs={make_sequence_ring()}"
    before = before.replace(make_all_reduce("{}"), f"%r = (bf16[8,4,16], bf16[8,4,16]) {hop}")
    found = parse_only_collective(*lines, before=before, mesh=FIVE_AXES, partitions=32)
    assert found == Collective("collective-permute", ("sequence",), 4, 2 * 8 * 4 * 16 * 2, 3, "")
    assert found.count * found.sent_bytes_per_device == 3 * 2 * 8 * 4 * 16 * 2


def test_an_all_reduce_before_a_slice_remains_an_all_reduce():
    cut = "%s = f32[4,16]{1,0} dynamic-slice(%r, %i, %zero), dynamic_slice_sizes={4,16}"
    found = parse_only_collective(make_all_reduce("[4,2]<=[8]"), cut)
    assert (found.kind, found.sent_bytes_per_device) == ("all-reduce", 2 * 512 // 2)


def test_a_collective_has_the_name_of_its_traced_operation():
    found = parse_only_collective(
        make_all_reduce("{}") + r', metadata={op_name="jit(step)/state.params[\'w\']" stack_frame_id=3}'
    )
    assert found.op_name == "jit(step)/state.params['w']"


TABLES = """
FileNames
1 "/src/experiments/gpt.py"
2 "/src/runner/train/step.py"

FunctionNames
1 "forward"

FileLocations
1 {file_name_id=2 function_name_id=1 line=38 end_line=38 column=11 end_column=11}
2 {file_name_id=1 function_name_id=1 line=125 end_line=125 column=28 end_column=28}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
7 {file_location_id=2 parent_frame_id=2}


%add"""


@pytest.mark.parametrize(
    ("metadata", "source"),
    [
        ("stack_frame_id=7", "/src/experiments/gpt.py:125"),
        ("stack_frame_id=1", "/src/runner/train/step.py:38"),
        ("stack_frame_id=9", ""),
        ('source_file="/src/a.py" source_line=3', "/src/a.py:3"),
        ("", ""),
    ],
)
def test_a_collective_has_its_source_line_and_shapes(metadata, source):
    line = make_all_reduce("{}") + f', metadata={{op_name="jit(step)/add" {metadata}}}'
    (found,) = find_collectives(make_module(line).replace("%add", TABLES, 1), MESH)
    assert (found.source, found.shapes) == (source, ((8, 16),))


# Trip counts.


def make_computation(name, *lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"%{name} (p: (s32[], f32[8])) -> (s32[], f32[8]) {{\n{body}\n}}\n\n"


def make_loop(start, step, bound, direction, *, swapped=False):
    """Make a loop around an all-reduce whose counter has the form of TPU programs."""
    operands = "%bound, %i" if swapped else "%i, %bound"
    before = make_computation(
        "cond",
        "%state = (s32[], f32[8]) parameter(0)",
        "%i = s32[] get-tuple-element(%state), index=0",
        f"%bound = s32[]{{:T(128)}} constant({bound})",
        f"ROOT %test = pred[] compare({operands}), direction={direction}",
    ) + make_computation(
        "body",
        "%state.1 = (s32[], f32[8]) parameter(0)",
        "%i.1 = s32[] get-tuple-element(%state.1), index=0",
        f"%step = s32[]{{:T(128)}} constant({step})",
        "%next = s32[]{:T(128)S(6)} add(%i.1, %step)",
        make_all_reduce("{}"),
        "ROOT %out = (s32[], f32[8]) tuple(%next, %r)",
    )
    lines = (
        f"%zero = s32[]{{:T(128)}} constant({start})",
        "%first = s32[]{:T(128)S(6)} copy(%zero)",
        "%in = (s32[], f32[8]) tuple(%first, %p)",
        "%loop = (s32[], f32[8]) while(%in), condition=%cond, body=%body",
    )
    return lines, before


@pytest.mark.parametrize(
    ("start", "step", "bound", "direction", "trips"),
    [
        (0, 1, 12, "LT", 12),
        (0, 2, 8, "LT", 4),
        (0, 3, 8, "LT", 3),
        (1, 1, 12, "LE", 12),
        (11, -1, 0, "GE", 12),
        (12, -1, 0, "GT", 12),
        (0, 1, 12, "NE", 12),
        (5, 1, 5, "LT", 0),
    ],
)
def test_unstated_trip_counts_follow_from_start_step_and_bound(start, step, bound, direction, trips):
    lines, before = make_loop(start, step, bound, direction)
    found = find_collectives(make_module(*lines, before=before), MESH)
    assert [(one.count, one.is_at_least) for one in found] == [(trips, False)] * (trips > 0)


def test_the_bound_may_be_the_left_operand():
    lines, before = make_loop(0, 1, 12, "GT", swapped=True)
    assert parse_only_collective(*lines, before=before).count == 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("copy(%zero)", "get-tuple-element(%p), index=3"),
        ("add(%i.1, %step)", "multiply(%i.1, %step)"),
        ("direction=LT", "direction=GT"),
        ("tuple(%first, %p)", "custom-call(%first, %p)"),
    ],
)
def test_unknown_trip_counts_make_the_count_a_lower_bound(old, new):
    lines, before = make_loop(0, 1, 12, "LT")
    found = parse_only_collective(*(line.replace(old, new) for line in lines), before=before.replace(old, new))
    assert (found.count, found.is_at_least) == (1, True)


STATED_TRIPS = 'backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'


def test_trip_counts_multiply_through_loops_calls_and_conditionals():
    before = (
        make_computation("inner", make_all_reduce("{}"))
        + make_computation("branch", make_all_reduce("{}").replace("%r ", "%s "))
        + make_computation(
            "outer",
            f"%a = (s32[], f32[8]) while(%p), condition=%cond, body=%inner, {STATED_TRIPS}",
            "%b = f32[8] conditional(%i, %p, %p), branch_computations={%branch, %branch}",
            "%c = f32[8] conditional(%i, %p, %p), true_computation=%branch, false_computation=%other",
            "%d = f32[8] call(%p), to_apply=%branch",
        )
    )
    lines = (f"%w = (s32[], f32[8]) while(%p), condition=%cond, body=%outer, {STATED_TRIPS.replace('3', '5')}",)
    found = find_collectives(make_module(*lines, before=before), MESH)
    assert [one.count for one in found] == [15, 20]


def test_an_asynchronous_computation_counts_once():
    before = make_computation("wrapped", make_all_reduce("{}"))
    found = parse_only_collective(
        "%s = ((f32[8]), f32[8], s32[]) async-start(%p), calls=%wrapped",
        "%u = ((f32[8]), f32[8], s32[]) async-update(%s), calls=%wrapped",
        "%d = f32[8] async-done(%u), calls=%wrapped",
        before=before,
    )
    assert found.count == 1
    sugared = "%s = ((f32[8]), f32[8], s32[]) all-to-all-start(%p), replica_groups={}, channel_id=1, calls=%wrapped"
    assert [one.kind for one in find_collectives(make_module(sugared, before=before), MESH)] == ["all-to-all"]


def test_a_computation_that_is_never_called_does_not_count():
    assert find_collectives(make_module(before=make_computation("dead", make_all_reduce("{}"))), MESH) == []


# Excerpts of steps compiled by libtpu; names, shapes, groups and attributes are original.

TPU_RING = """
%windowed_cond (wide.param: (bf16[1,32,512], bf16[1,32,512], u32[])) -> pred[] {
  %constant.2657 = u32[]{:T(128)} constant(8)
  %wide.param.121 = (bf16[1,32,512]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,32,512]{2,1,0}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.4080 = u32[]{:T(128)} get-tuple-element(%wide.param.121), index=2
  ROOT %compare.78 = pred[]{:T(512)} compare(%get-tuple-element.4080, %constant.2657), direction=LT
}

%windowed_body (wide.param.1: (bf16[1,32,512], bf16[1,32,512], u32[])) -> (bf16[1,32,512], bf16[1,32,512], u32[]) {
  %constant.1 = u32[]{:T(128)} constant(1)
  %constant.2 = u32[]{:T(128)} constant(2)
  %wide.param.21 = (bf16[1,32,512]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,32,512]{2,1,0}, u32[]{:T(128)}) parameter(0)
  %get-tuple-element.5422 = bf16[1,32,512]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.21), index=0
  %collective-permute-start.64 = (bf16[1,32,512]{2,1,0:T(8,128)(2,1)S(1)}, bf16[1,32,512]{2,1,0:T(8,128)(2,1)S(1)}, \
u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%get-tuple-element.5422), channel_id=12, \
source_target_pairs={{0,3},{1,0},{2,1},{3,2}}, metadata={op_name="jit(step)/jvp(GPT)/dot_general" stack_frame_id=170}
  %get-tuple-element.5424 = u32[]{:T(128)} get-tuple-element(%wide.param.21), index=2
  %add.1969 = u32[]{:T(128)S(6)} add(%get-tuple-element.5424, %constant.1)
  %add.1971 = u32[]{:T(128)} add(%get-tuple-element.5424, %constant.2)
  %collective-permute-done.64 = bf16[1,32,512]{2,1,0} collective-permute-done(%collective-permute-start.64)
  ROOT %tuple.653 = (bf16[1,32,512]{2,1,0}, bf16[1,32,512]{2,1,0}, u32[]{:T(128)}) tuple(%collective-permute-done.64, \
%get-tuple-element.5422, /*index=2*/%add.1971)
}

"""


def test_a_collective_matmul_on_tpu_counts_every_hop():
    found = parse_only_collective(
        "%zero = u32[]{:T(128)} constant(0)",
        "%copy.551 = u32[]{:T(128)} copy(%zero)",
        "%tuple.684 = (bf16[1,32,512]{2,1,0}, bf16[1,32,512]{2,1,0}, u32[]{:T(128)}) tuple(%p, %p, %copy.551)",
        "%while.176 = (bf16[1,32,512]{2,1,0}, bf16[1,32,512]{2,1,0}, u32[]{:T(128)}) while(%tuple.684), "
        'condition=%windowed_cond, body=%windowed_body, backend_config={"flag_configs":[]}',
        before=TPU_RING,
        partitions=4,
        mesh={"data": 1, "fsdp": 4, "tensor": 1},
    )
    assert found == Collective("collective-permute", ("fsdp",), 4, 32 * 512 * 2, 4, "jit(step)/jvp(GPT)/dot_general")


PIECE = (
    "all-gather(%param), channel_id=130, replica_groups=[4,2]<=[8], dimensions={1}, use_global_device_ids=true, "
    'frontend_attributes={chain_id="8"}, metadata={op_name="dot_general" stack_frame_id=230}'
)
TPU_CHAIN = f"""
%fused_computation.423 (param: bf16[1,512,1024]) -> (bf16[1,512,1024], bf16[1,1024,1024], s32[2], u32[]) {{
  %all-gather.241 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} {PIECE}
  ROOT %custom-call.59 = (bf16[1,512,1024]{{2,1,0:T(8,128)(2,1)S(1)}}, bf16[1,1024,1024]{{2,1,0}}, s32[2]{{0:S(4)}}, \
u32[]{{:S(2)}}) custom-call(%all-gather.241), custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.738 (param: bf16[1,512,1024]) -> (bf16[1024,512], bf16[1,1024,1024]) {{
  %all-gather.243 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)S(1)}} {PIECE}
  ROOT %tuple.676 = (bf16[1024,512]{{1,0}}, bf16[1,1024,1024]{{2,1,0}}) tuple(%convolution.153, %all-gather.243)
}}

%fused_computation.430 (param: bf16[1,512,1024]) -> bf16[1,1024,1024] {{
  %all-gather.255 = bf16[1,1024,1024]{{2,1,0:T(8,128)(2,1)}} {PIECE}
  ROOT %custom-call.61 = bf16[1,1024,1024]{{2,1,0}} custom-call(%all-gather.255), \
custom_call_target="AsyncCollectiveDone"
}}

%windowed (p: bf16[8]) -> bf16[8] {{
  %fusion.363 = (bf16[1024,512], bf16[1,1024,1024]) fusion(%p), kind=kCustom, calls=%async_collective_fusion.738
}}
"""


@pytest.mark.parametrize("is_step_first", [False, True])
def test_an_all_gather_spread_over_fusions_counts_once_at_its_start(is_step_first):
    before = TPU_CHAIN
    if is_step_first:
        start, step, *rest = before.strip().split("\n\n")
        before = "\n\n".join([step, start, *rest])
    found = parse_only_collective(
        "%async-collective-start = (bf16[1,512,1024]) fusion(%p), kind=kCustom, calls=%fused_computation.423",
        f"%while.1 = (bf16[8]) while(%p), condition=%cond, body=%windowed, {STATED_TRIPS}",
        "%async-collective-done = bf16[1,1024,1024] fusion(%p), kind=kCustom, calls=%fused_computation.430",
        before=before,
    )
    assert (found.kind, found.axes, found.bytes, found.count) == ("all-gather", ("tensor",), 2 * 1024 * 1024, 1)


TPU_ALL_REDUCE_SCATTER = """
%all-reduce-scatter.2.clone.1 (input.15: bf16[2048,4096]) -> bf16[520,4096] {
  %input.15 = bf16[2048,4096]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %constant.1192 = bf16[] constant(0)
  %pad.4 = bf16[2080,4096]{1,0:T(8,128)(2,1)} pad(%input.15, %constant.1192), padding=0_32x0_0
  %all-reduce.106 = bf16[2080,4096]{1,0:T(8,128)(2,1)} all-reduce(%pad.4), channel_id=47, \
replica_groups={{0,2,4,6},{8,10,12,14},{1,3,5,7},{9,11,13,15}}, use_global_device_ids=true, to_apply=%add, \
frontend_attributes={from-cross-replica-sharding="true"}
  %constant.shard_id_table.16 = u32[16]{0:T(128)} constant({...})
  %partition-id.33 = u32[] partition-id()
  %dynamic-slice.432 = u32[1]{0:T(128)} dynamic-slice(%constant.shard_id_table.16, %partition-id.33)
  %multiply.243 = u32[]{:T(128)} multiply(%bitcast.518, %constant.1193)
  ROOT %dynamic-slice.433 = bf16[520,4096]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%all-reduce.106, %multiply.243), \
dynamic_slice_sizes={520,4096}
}

"""


def test_an_all_reduce_with_a_kept_slice_is_a_reduce_scatter():
    fusion = "%fusion.352 = bf16[520,4096] fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2.clone.1"
    mesh = {"data": 2, "fsdp": 4, "tensor": 2}
    named = f'{fusion}, metadata={{op_name="mlp_in/dot_general" stack_frame_id=205}}'
    found = parse_only_collective(named, before=TPU_ALL_REDUCE_SCATTER, partitions=16, mesh=mesh)
    assert found == Collective("reduce-scatter", ("fsdp",), 4, 2080 * 4096 * 2, 1, "mlp_in/dot_general")
    assert found.sent_bytes_per_device == 2080 * 4096 * 2 * 3 // 4
    # The kept slice must be the device's own shard; with another slice it remains an all-reduce.
    other = TPU_ALL_REDUCE_SCATTER.replace("bf16[520,4096]{1,0:T(8,128)(2,1)S(1)} dynamic", "bf16[8,4096] dynamic")
    assert parse_only_collective(fusion, before=other, partitions=16, mesh=mesh).kind == "all-reduce"


def test_a_send_between_tpu_slices_names_its_collective():
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        '_xla_host_transfer_rendezvous="all-reduce.97_0",_xla_megascale_reduce_operation="SUM",'
        '_xla_megascale_target="{1,2}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    within = "replica_groups={{0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15}}, channel_id=9, use_global_device_ids=true"
    sent = "(bf16[64,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[])"
    lines = (
        f"%all-gather.1 = bf16[512]{{0}} all-gather(%p), {within}, dimensions={{0}}",
        f"%send.22 = {sent} send(%p, %token), channel_id=8, {attributes}",
        f"%recv.22 = {sent} recv(%token), channel_id=7, {attributes}",
        "%send-done.22 = token[] send-done(%send.22), channel_id=8, is_host_transfer=true",
    )
    found = find_collectives(make_module(*lines, partitions=16), {"data": 2, "fsdp": 16, "tensor": 1})
    assert found == [
        Collective("all-gather", ("fsdp",), 16, 1024, 1, ""),
        Collective("all-reduce", ("data",), 2, 64 * 8 * 128 * 2, 1, "", is_between_slices=True),
    ]


def test_tpu_slices_may_be_given_by_their_devices():
    attributes = (
        "is_host_transfer=true, frontend_attributes={_xla_megascale_target={{100000,200000},{100001,200001},"
        '{300000,400000},{300001,400001}},_xla_megascale_transfer_type="ALL_GATHER"}'
    )
    sent = "(bf16[1,32,256]{2,1,0:T(8,128)(2,1)}, u32[], token[])"
    line = f"%send.83 = {sent} send(%p, %token), channel_id=18, {attributes}"
    mesh = {"data": 2, "fsdp": 4, "tensor": 1}
    expected = Collective("all-gather", ("fsdp",), 2, 2 * 32 * 256 * 2, 1, "", is_between_slices=True)
    assert parse_only_collective(line, partitions=2, mesh=mesh) == expected
    across = (
        line.replace("{100001,200001},{300000,400000},", "")
        .replace("0,200000", "0,300000")
        .replace("300001,", "200001,")
    )
    assert parse_only_collective(across, partitions=2, mesh=mesh).axes == ("data",)
    with pytest.raises(ValueError, match=r"send\.83: slices of an unknown form"):
        parse_only_collective(line.replace("{{100000,200000}", "[[100000,200000]"), partitions=2, mesh=mesh)


# Memory.


def test_the_largest_arrays_have_the_names_of_their_ops_or_arguments():
    before = (
        "%fused (x: f32[999]) -> f32[999] {\n  ROOT %hidden = f32[999999]{0} negate(%x)\n}\n\n"
        + "%body (s: f32[512]) -> f32[512] {\n  %s = f32[555555]{0} parameter(0)\n"
        + '  %made = f32[50,10]{1,0} exponential(%s), metadata={op_name="body/exp"}\n}\n\n'
    )
    text = make_module(
        "%p = f32[100]{0} parameter(0), metadata={op_name=\"state.params['w']\"}",
        '%a = (f32[300]{0}, bf16[300]{0}) fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="layer/mul"}',
        '%again = f32[300]{0} negate(%p), metadata={op_name="layer/mul"}',
        "%b = f32[300]{0} get-tuple-element(%a), index=0",
        "%copy-start.1 = (f32[300]{0}, f32[300]{0:S(5)}, u32[]) copy-start(%b)",
        "%copy-done.1 = f32[300]{0} copy-done(%copy-start.1)",
        "%c = f32[400]{0:T(1024)S(1)} negate(%p)",
        "%d = f32[250]{0} negate(%p)",
        "%t = (f32[300]{0}, f32[777]{0}) tuple(%b, %c)",
        f"%w = (f32[888]{{0}}) while(%t), condition=%cond, body=%body, {STATED_TRIPS}",
        before=before,
    )
    expected = [
        Buffer(2000, "f32[50,10]", "body/exp"),
        Buffer(1200, "f32[300]", "layer/mul"),
        Buffer(1000, "f32[250]", "d"),
        Buffer(600, "bf16[300]", "layer/mul"),
        Buffer(400, "f32[100]", "state.params['w']"),
    ]
    assert find_largest_arrays(text, 9) == expected
    assert find_largest_arrays(text, 2) == expected[:2]


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[4,64]{1,0:T(8,128)(2,1)}", 8 * 128 * 2),
        ("bf16[64,4]{0,1:T(8,128)(2,1)}", 8 * 128 * 2),
        ("f32[3,5,200]{2,1,0:T(8,128)}", 3 * 8 * 256 * 4),
        ("f32[5]{0:T(1024)}", 1024 * 4),
        ("f32[5]{0}", 20),
    ],
)
def test_a_tiled_array_occupies_whole_tiles(shape, size):
    assert find_largest_arrays(make_module(f"%x = {shape} negate(%p)"), 1)[0].bytes == size
