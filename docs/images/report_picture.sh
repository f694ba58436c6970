#!/bin/sh
# Draw docs/images/report.png, the picture in the README, from the report that `make demo` writes.
# Run it from the repository's root: sh docs/images/report_picture.sh
set -eu
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# Plots are drawn by scripts of the page, so the browser gets (virtual) time before the picture.
chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile" \
    --blink-settings=preferredColorScheme=1 --virtual-time-budget=20000 --window-size=1280,1190 \
    --screenshot="$PWD/docs/images/report.png" "file://$PWD/report.html"
