"""In place of SGLang's compiled kernels, which need a GPU: any name can be imported, none can be
called."""

__version__ = "999.0"  # SGLang asks for a lowest version


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    return absent
