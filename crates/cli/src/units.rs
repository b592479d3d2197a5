//! Sizes, rates and durations as people write them: `512KiB`, `1GB/s`, `300ms`.
//!
//! A number that could mean two things moves a guest at an eighth of the intended rate, or stops it a thousand times
//! too long. So units are exact, upper and lower case matter, and what is not in the tables below is refused with an
//! example. Only a size may do without a unit: then it is bytes. The arithmetic is exact: nothing is rounded.

use std::time::Duration;

use sterna_wire::limits::{MAX_CONTENT, MIN_PACKET_SIZE};

/// The longest `--downtime`: QEMU takes no larger `downtime-limit` (`migration/options.c`, 2000 s).
const MAX_DOWNTIME: Duration = Duration::from_secs(2000);

/// CPUs, as a plain number above 0: `2`, `0.5`.
pub(crate) fn cores(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(cores) if cores.is_finite() && cores > 0.0 => Ok(cores),
        _ => Err("a number of CPUs above 0 is expected, such as 2 or 0.5".to_owned()),
    }
}

/// One unit: its value is `times / per` of the quantity's base unit.
#[derive(Debug)]
struct Unit {
    name: &'static str,
    times: u64,
    per: u64,
}

const fn unit(name: &'static str, times: u64) -> Unit {
    Unit { name, times, per: 1 }
}

/// A unit of bits, in bytes.
const fn bits(name: &'static str, times: u64) -> Unit {
    Unit { name, times, per: 8 }
}

/// What is measured, and in which units.
#[derive(Debug)]
struct Quantity {
    /// In which unit the result is counted, for error texts.
    base: &'static str,
    units: &'static [Unit],
    /// Whether a number alone is taken in the base unit.
    bare: bool,
    /// The units and an example, for error texts.
    help: &'static str,
}

const SIZE: Quantity = Quantity {
    base: "bytes",
    units: &[
        unit("B", 1),
        unit("kB", 1_000),
        unit("MB", 1_000_000),
        unit("GB", 1_000_000_000),
        unit("TB", 1_000_000_000_000),
        unit("KiB", 1 << 10),
        unit("MiB", 1 << 20),
        unit("GiB", 1 << 30),
        unit("TiB", 1 << 40),
    ],
    bare: true,
    help: "B, kB, MB, GB, TB (steps of 1000) or KiB, MiB, GiB, TiB (steps of 1024), such as 512KiB",
};

const RATE: Quantity = Quantity {
    base: "bytes per second",
    units: &[
        unit("B/s", 1),
        unit("kB/s", 1_000),
        unit("MB/s", 1_000_000),
        unit("GB/s", 1_000_000_000),
        unit("KiB/s", 1 << 10),
        unit("MiB/s", 1 << 20),
        unit("GiB/s", 1 << 30),
        bits("bit/s", 1),
        bits("kbit/s", 1_000),
        bits("Mbit/s", 1_000_000),
        bits("Gbit/s", 1_000_000_000),
    ],
    bare: false,
    help: "B/s, kB/s, MB/s, GB/s, KiB/s, MiB/s, GiB/s (bytes) or bit/s, kbit/s, Mbit/s, Gbit/s (bits), such as 125MB/s \
           or 1Gbit/s",
};

const DURATION: Quantity = Quantity {
    base: "nanoseconds",
    units: &[unit("us", 1_000), unit("ms", 1_000_000), unit("s", 1_000_000_000), unit("min", 60_000_000_000)],
    bare: false,
    help: "us, ms, s or min, such as 300ms",
};

/// Why a text is not the quantity that it should be. The text itself is not repeated: clap shows it with the option.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum UnitError {
    /// It begins with a minus sign and a number.
    #[error("it cannot be negative")]
    Negative,
    /// It does not begin with a number.
    #[error("it must begin with a number, followed by {0}")]
    NoNumber(&'static str),
    /// A number without a unit, where that could mean many things.
    #[error("the unit is missing; it must be {0}")]
    NoUnit(&'static str),
    /// A unit that is not in the table.
    #[error("the unit '{given}' is unknown or could mean two things; it must be {help}")]
    UnknownUnit {
        /// What stands where the unit should be.
        given: String,
        /// The units.
        help: &'static str,
    },
    /// More digits than make sense.
    #[error("the number has too many digits")]
    TooLong,
    /// A fraction of the base unit.
    #[error("it is not a whole number of {0}")]
    NotWhole(&'static str),
    /// Does not fit.
    #[error("it is larger than can be counted")]
    TooLarge,
    /// Outside of what the option takes.
    #[error("{0}")]
    Range(&'static str),
}

/// Bytes.
pub(crate) fn size(text: &str) -> Result<u64, UnitError> {
    parse(text, &SIZE)
}

/// Bytes per second, at least one.
pub(crate) fn rate(text: &str) -> Result<u64, UnitError> {
    match parse(text, &RATE)? {
        0 => Err(UnitError::Range("nothing could be sent; leave the option out for no limit")),
        rate => Ok(rate),
    }
}

/// A duration.
pub(crate) fn duration(text: &str) -> Result<Duration, UnitError> {
    parse(text, &DURATION).map(Duration::from_nanos)
}

/// Longest `--wait`.
const MAX_WAIT: Duration = Duration::from_secs(3600);

/// A value of `--downtime`: 1 ms to 2000 s.
pub(crate) fn downtime(text: &str) -> Result<Duration, UnitError> {
    let downtime = duration(text)?;
    if (Duration::from_millis(1)..=MAX_DOWNTIME).contains(&downtime) {
        Ok(downtime)
    } else {
        Err(UnitError::Range("the downtime can be 1ms to 2000s"))
    }
}

/// A value of `--wait`: up to an hour; 0s is none.
pub(crate) fn wait(text: &str) -> Result<Duration, UnitError> {
    let wait = duration(text)?;
    if wait <= MAX_WAIT { Ok(wait) } else { Err(UnitError::Range("the wait can be 0s to 60min")) }
}

/// A value of `--packet-size`: whole pages of 4 KiB, at most what the protocol carries.
pub(crate) fn packet_size(text: &str) -> Result<usize, UnitError> {
    const RANGE: UnitError = UnitError::Range("a packet holds whole pages of 4KiB, 4KiB to 16MiB of them");
    const { assert!(MIN_PACKET_SIZE == 4 << 10 && MAX_CONTENT == 16 << 20, "the text above says so") };
    let size = usize::try_from(size(text)?).map_err(|_| RANGE)?;
    if (MIN_PACKET_SIZE..=MAX_CONTENT).contains(&size) && size.is_multiple_of(MIN_PACKET_SIZE) {
        Ok(size)
    } else {
        Err(RANGE)
    }
}

fn parse(text: &str, quantity: &Quantity) -> Result<u64, UnitError> {
    if text.strip_prefix('-').is_some_and(|rest| rest.starts_with(|character: char| character.is_ascii_digit())) {
        return Err(UnitError::Negative);
    }
    let end = text.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(text.len());
    let (number, name) = text.split_at(end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(UnitError::NoNumber(quantity.help));
    }
    // `1.50 GiB` is how reports print it.
    let name = name.strip_prefix(' ').unwrap_or(name);
    let unit = match quantity.units.iter().find(|unit| unit.name == name) {
        Some(unit) => unit,
        None if name.is_empty() && quantity.bare => &unit("", 1),
        None if name.is_empty() => return Err(UnitError::NoUnit(quantity.help)),
        None => return Err(UnitError::UnknownUnit { given: name.to_owned(), help: quantity.help }),
    };

    // At most 29 digits times 2^46: far below 2^128, so no step overflows.
    if whole.len() > 20 || fraction.len() > 9 {
        return Err(UnitError::TooLong);
    }
    let digits: u128 = format!("{whole}{fraction}").parse().map_err(|_| UnitError::TooLong)?;
    let value = digits * u128::from(unit.times);
    let divisor = 10_u128.pow(fraction.len() as u32) * u128::from(unit.per);
    if !value.is_multiple_of(divisor) {
        return Err(UnitError::NotWhole(quantity.base));
    }
    u64::try_from(value / divisor).map_err(|_| UnitError::TooLarge)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read_with_their_unit_or_as_bytes() {
        assert_eq!(size("512KiB"), Ok(524_288));
        assert_eq!(size("1MB"), Ok(1_000_000));
        assert_eq!(size("1.50 GiB"), Ok(1_610_612_736));
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("18446744073709551615"), Ok(u64::MAX));
    }

    #[test]
    fn rates_are_bytes_or_bits_as_written() {
        assert_eq!(rate("1GB/s"), Ok(1_000_000_000));
        assert_eq!(rate("125MB/s"), rate("1Gbit/s"));
        assert_eq!(rate("2.5Gbit/s"), Ok(312_500_000));
        assert_eq!(rate("8bit/s"), Ok(1));
    }

    #[test]
    fn durations_are_read_with_their_unit() {
        assert_eq!(duration("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(duration("0.3s"), duration("300ms"));
        assert_eq!(duration("2min"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("1.5us"), Ok(Duration::from_nanos(1500)));
    }

    #[test]
    fn what_could_mean_two_things_is_refused_with_an_example() {
        for text in
            ["512K", "512k", "1M", "1G", "1KB", "1Mb", "1mb", "1gib", "1Gi", "1e3", "1,5MB", "0x10", "1  MB", "1MB "]
        {
            let error = size(text).unwrap_err();
            assert!(matches!(error, UnitError::UnknownUnit { .. }), "{text}: {error}");
            assert!(error.to_string().ends_with("such as 512KiB"), "{text}: {error}");
        }
        for text in ["1G", "1GB", "1Gb/s", "1Gbps", "1gbit/s", "100M/s", "1KB/s", "1GB/S", "1 GB / s"] {
            let error = rate(text).unwrap_err();
            assert!(matches!(error, UnitError::UnknownUnit { .. }), "{text}: {error}");
            assert!(error.to_string().ends_with("such as 125MB/s or 1Gbit/s"), "{text}: {error}");
        }
        for text in ["5m", "300MS", "300msec", "1h", "1S"] {
            let error = duration(text).unwrap_err();
            assert!(matches!(error, UnitError::UnknownUnit { .. }), "{text}: {error}");
            assert!(error.to_string().ends_with("such as 300ms"), "{text}: {error}");
        }
        assert_eq!(rate("1000"), Err(UnitError::NoUnit(RATE.help)));
        assert_eq!(duration("300"), Err(UnitError::NoUnit(DURATION.help)));
    }

    #[test]
    fn what_is_no_number_or_no_whole_one_is_refused() {
        for text in ["", " 1MB", "MB", "-MB", "+1MB", ".5MB", "1.", "1.MB", "1.2.3MB", "..", "ten"] {
            assert_eq!(size(text), Err(UnitError::NoNumber(SIZE.help)), "{text}");
        }
        assert_eq!(size("-1MB"), Err(UnitError::Negative));
        assert_eq!(size("1.5"), Err(UnitError::NotWhole("bytes")));
        assert_eq!(size("0.3KiB"), Err(UnitError::NotWhole("bytes")));
        assert_eq!(rate("4bit/s"), Err(UnitError::NotWhole("bytes per second")));
        assert_eq!(size("18446744073709551616"), Err(UnitError::TooLarge));
        assert_eq!(size("99999999999999999999TiB"), Err(UnitError::TooLarge));
        assert_eq!(size("999999999999999999999"), Err(UnitError::TooLong));
        assert_eq!(size("1.0000000000MB"), Err(UnitError::TooLong));
    }

    #[test]
    fn options_hold_their_values_to_what_can_work() {
        assert_eq!(packet_size("512KiB"), Ok(512 << 10));
        assert_eq!(packet_size("16MiB"), Ok(16 << 20));
        for text in ["0", "1", "4095", "5000", "10kB", "17MiB", "1TiB"] {
            assert!(matches!(packet_size(text), Err(UnitError::Range(_))), "{text}");
        }
        assert_eq!(downtime("300ms"), Ok(Duration::from_millis(300)));
        for text in ["0s", "999us", "2001s", "1000min"] {
            assert!(matches!(downtime(text), Err(UnitError::Range(_))), "{text}");
        }
        assert!(matches!(rate("0MB/s"), Err(UnitError::Range(_))));
    }

    fn any_unit() -> impl Strategy<Value = (&'static Quantity, &'static Unit)> {
        prop_oneof![Just(&SIZE), Just(&RATE), Just(&DURATION)].prop_flat_map(|quantity| {
            (Just(quantity), proptest::sample::select(quantity.units.iter().collect::<Vec<_>>()))
        })
    }

    proptest! {
        #[test]
        fn every_number_in_every_unit_is_that_number_of_base_units((quantity, unit) in any_unit(), number in any::<u32>()) {
            let exact = u128::from(number) * u128::from(unit.times);
            let expected = match (exact % u128::from(unit.per), u64::try_from(exact / u128::from(unit.per))) {
                (0, Ok(value)) => Ok(value),
                (0, Err(_)) => Err(UnitError::TooLarge),
                _ => Err(UnitError::NotWhole(quantity.base)),
            };
            prop_assert_eq!(parse(&format!("{number}{}", unit.name), quantity), expected.clone());
            prop_assert_eq!(parse(&format!("{number}.000 {}", unit.name), quantity), expected);
        }

        #[test]
        fn a_fraction_is_the_same_as_more_of_the_smaller_unit(thousandths in 0_u64..10_000_000) {
            let (whole, rest) = (thousandths / 1000, thousandths % 1000);
            prop_assert_eq!(size(&format!("{whole}.{rest:03}MB")), size(&format!("{thousandths}kB")));
            prop_assert_eq!(parse(&format!("{whole}.{rest:03}Gbit/s"), &RATE), parse(&format!("{thousandths}Mbit/s"), &RATE));
            prop_assert_eq!(duration(&format!("{whole}.{rest:03}s")), duration(&format!("{thousandths}ms")));
        }

        #[test]
        fn the_case_of_a_unit_is_never_guessed((quantity, unit) in any_unit(), flips in any::<u8>()) {
            let flipped = |character: char| match character.is_ascii_uppercase() {
                true => character.to_ascii_lowercase(),
                false => character.to_ascii_uppercase(),
            };
            let chosen = |index: usize| flips >> index & 1 == 1;
            let letters = unit.name.chars().enumerate();
            let name: String = letters.map(|(i, letter)| if chosen(i) { flipped(letter) } else { letter }).collect();
            let known = quantity.units.iter().any(|unit| unit.name == name);
            let refused = matches!(parse(&format!("8{name}"), quantity), Err(UnitError::UnknownUnit { .. }));
            prop_assert_eq!(refused, !known);
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9.]{0,40}.{0,8}") {
            for quantity in [&SIZE, &RATE, &DURATION] {
                if let Err(error) = parse(&text, quantity) {
                    prop_assert!(!error.to_string().contains('\n') || text.contains('\n'));
                }
            }
        }
    }
}
