"""Which loop of a kernel the counts of instructions are of."""

from __future__ import annotations

from tools.count_issue_slots import parse, steady_state


def listing(*lines: str) -> str:
    """A kernel as nvdisasm prints it."""
    body = "".join(f"{line}\n" if line.startswith(".L") else f" /*0000*/ {line} ;\n" for line in lines)
    return f".text.kernel:\n{body}"


def test_the_loop_of_quick_steps_is_counted_and_not_the_loop_around_it() -> None:
    product, values = "IMMA.16832.S8.S8 R0, R4, R8, R12", "IMMA.16832.U8.S8 R0, R4, R8, R12"
    outer = (
        ".L_x_0:", "MOV R1, R2",
        ".L_x_1:", product, product, values, "FADD R1, R2, R3", "@P0 BRA `(.L_x_1)",
        product, product, values, *["FADD R1, R2, R3"] * 9, "@P1 BRA `(.L_x_0)", "EXIT",
    )  # fmt: skip
    (code, labels) = parse(listing(*outer))["kernel"]
    path = steady_state(code, labels)
    assert [instruction.kind for instruction in path] == ["tensor", "tensor", "tensor", "FMA", "other"]


def test_a_path_that_skips_a_product_is_not_the_steady_state() -> None:
    product, values = "IMMA.16832.S8.S8 R0, R4, R8, R12", "IMMA.16832.U8.S8 R0, R4, R8, R12"
    lines = (".L_x_0:", product, product, "@P0 BRA `(.L_x_1)", values, ".L_x_1:", "@P1 BRA `(.L_x_0)", "EXIT")
    (code, labels) = parse(listing(*lines))["kernel"]
    assert [instruction.kind for instruction in steady_state(code, labels)].count("tensor") == 3
