#!/bin/sh
# HAProxy with what Serve's template lacks: its statistics and metrics, which want no key, are bound to loopback, and a
# client has 20 s for its headers.
# Serve starts this in its place (RAY_SERVE_HAPROXY_BINARY_PATH); SERVE_APP_HAPROXY is the program itself.
set -eu
before=
for word do
    shift
    if [ "$before" = -f ]; then
        sed -e '/^\(frontend prometheus\|listen stats\)$/,/bind/s/^\( *bind \)\*\{0,1\}\(:[0-9][0-9]*\)/\1127.0.0.1\2/' \
            -e 's/^defaults$/&\n    timeout http-request 20s/' "$word" >"$word.loopback"
        word=$word.loopback
    fi
    set -- "$@" "$word"
    before=$word
done
exec "$SERVE_APP_HAPROXY" "$@"
