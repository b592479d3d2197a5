//! Guests side by side: what each does depends on the machine's speed, and on what else it does. `make soak` runs these tests, `make test` does
//! not (.config/nextest.toml).

use crate::support::{KINDS, LONG, SerialOutput, busy, config, filled, goes_on_well};

#[test]
fn throttled_guests_do_less() {
    for kind in [KINDS[0], KINDS[1], KINDS[3]] {
        // Two side by side, so that other load on the processors slows down both.
        let config = config(kind, 1, busy());
        let Some(full) = filled(&config, &SerialOutput::default()) else { continue };
        let throttled = filled(&config, &SerialOutput::default()).unwrap();
        let race = || {
            let before = (full.report().written(), throttled.report().written());
            let reached = full.wait_until(LONG, |now| now.written() > before.0 + 100_000).unwrap();
            (reached.written() - before.0, throttled.report().written() - before.1)
        };
        throttled.throttle(95);
        let (most, least) = race();
        assert!(least < most / 2, "{least} of {most}: {}", throttled.description());
        // A throttled guest can be paused, and is as fast as before without throttling.
        throttled.throttle(99);
        throttled.pause().unwrap();
        throttled.resume().unwrap();
        throttled.throttle(0);
        let (_, again) = race();
        assert!(again > least, "{again} after {least}");
        let since = throttled.report();
        goes_on_well(&throttled, &since, throttled.description());
    }
}
