"""The example of the README's first screen, in whatever environment runs this file; no test tools are needed."""

import sys
from pathlib import Path

from documented import PRELUDE

readme = (Path(__file__).parents[1] / "README.md").read_text()
block = readme.split("```diff\n")[1].split("```")[0]
namespace: dict = {}
exec(PRELUDE + "\n".join(line[2:] for line in block.splitlines()), namespace)
names = {
    name
    for callback in namespace["trainer"].callbacks
    for name in getattr(callback, "headline", ())
}
assert names == {"squared_displacement", "fisher_trace"}, names
history = namespace["trainer"].callbacks[0].history
assert history, "nothing was measured"
sys.stdout.write(
    f"The first screen's example ran: {history[-1]['information_nats']:.1f} nats in the weights\n"
)
