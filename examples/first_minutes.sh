#!/bin/sh
# A stranger's first minutes: clone, demo, the report of an own model, an own script.
#
#   sh examples/first_minutes.sh [ADDRESS]     ADDRESS is this checkout by default
#
# Each step is printed with the seconds that it took.  The report's page is left behind,
# to be opened in a browser.
set -e
address=${1:-$(git -C "$(dirname "$0")" rev-parse --show-toplevel)}
folder=$(mktemp -d)

step() {
  echo "\$ $*"
  begin=$(date +%s)
  "$@"
  echo "[$(($(date +%s) - begin)) s]"
  echo
}

cd "$folder"
step git clone --quiet "$address" autoamp
step make --silent -C autoamp demo
PATH="$folder/autoamp/.venv/bin:$PATH"

cat > mine.py <<'PYTHON'
"""A stranger's own model, and the script that trains it."""

import torch
from torch import nn


def make():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.TransformerEncoder(layer, 4))
    return model, (torch.randn(16, 64, 64),)


if __name__ == "__main__":
    model, (x,) = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(20):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after 20 steps: {loss.item():.4f}")
PYTHON

step autoamp explain mine.py:make --html report.html
step autoamp run mine.py
echo "the report: $folder/report.html"
