#!/bin/sh
# HAProxy with what Serve's template lacks: its statistics and metrics, which want no key, are bound to loopback, and a
# client has 20 s for its headers. Where no router can be reached, a client is told to come again: Serve's template says
# 500 then, and 404 for every path as long as HAProxy has just started and knows no application.
# Serve starts this in its place (RAY_SERVE_HAPROXY_BINARY_PATH); SERVE_APP_HAPROXY is the program itself.
set -eu
away='{"error": {"retry_after_s": 1, "message": "No router can be reached; retry.", "type": "unavailable_error", "param": null, "code": 503, "error_code": "unavailable"}}'
before=
for word do
    shift
    if [ "$before" = -f ]; then
        knows_none='/^backend default_backend$/,/return/s/ 404 .*/ 503 default-errorfiles/'
        if grep -q '^ *use_backend ' "$word"; then knows_none=; fi
        sed -e '/^\(frontend prometheus\|listen stats\)$/,/bind/s/^\( *bind \)\*\{0,1\}\(:[0-9][0-9]*\)/\1127.0.0.1\2/' \
            -e 's/^defaults$/&\n    timeout http-request 20s/' \
            -e "s/^ *errorfile 503 .*/    http-error status 503 content-type application\/json string '$away' hdr Retry-After 1/" \
            -e "$knows_none" "$word" >"$word.loopback"
        word=$word.loopback
    fi
    set -- "$@" "$word"
    before=$word
done
exec "$SERVE_APP_HAPROXY" "$@"
