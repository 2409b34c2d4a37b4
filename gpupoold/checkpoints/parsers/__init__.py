"""Search for a model's tool parser, reasoning parser and chat template in its small files.

``rules`` has the table of markup and parsers of vLLM and decides, ``search`` reads the files. The
package imports neither torch nor vLLM, because the daemon uses the package like workers and
frontends do, and all must agree.
"""

from gpupoold.checkpoints.parsers.rules import ChatFormat as ChatFormat, Finding as Finding
from gpupoold.checkpoints.parsers.search import (
    FoundParsers as FoundParsers,
    found_parsers as found_parsers,
)
