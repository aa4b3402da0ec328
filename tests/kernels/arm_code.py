"""Write the assembly of kernels as a Neoverse-N1 would have it, on any processor: `python -m tests.kernels.arm_code
NAME...`, names of `jit.EXPORTS`."""

from __future__ import annotations

import os
import platform
import sys

CPU, FEATURES = "neoverse-n1", "+dotprod"
os.environ |= {"NUMBA_CPU_NAME": CPU, "NUMBA_CPU_FEATURES": FEATURES}
platform.machine = lambda: "aarch64"

from weft.kernels.cpu import compiled, exports, jit  # noqa: E402, F401 (exports: its kernels)

llvm = compiled.llvm


def main() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=CPU, features=FEATURES, opt=3, reloc="pic", codemodel="default")
    codegen = jit._codegen_of_kernels()
    codegen._tm, codegen._data_layout = machine, str(machine.target_data)

    class Writer:
        """A machine that writes what it should have made an object file of."""

        def __getattr__(self, name: str) -> object:
            return getattr(machine, name)

        def emit_object(self, module: object) -> bytes:
            return machine.emit_assembly(module).encode()

    codegen._tm = Writer()
    for name in sys.argv[1:]:
        sys.stdout.write(jit.object_code(name).decode())


if __name__ == "__main__":
    main()
