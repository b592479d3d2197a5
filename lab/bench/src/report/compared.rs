//! The comparison of a figure of two cells that were run in turns.

use super::results::Results;
use crate::harness::Spread;

/// A figure that is compared, and its form.
#[derive(Clone, Copy, Debug)]
pub(super) struct Metric {
    /// The column of the JSON.
    pub(super) column: &'static str,
    pub(super) title: &'static str,
    pub(super) unit: &'static str,
    /// The divisor of the JSON's figure.
    pub(super) scale: f64,
    pub(super) places: usize,
}

/// Two cells of one benchmark.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// The label of the pair.
    pub(super) label: &'static str,
    pub(super) theirs: &'static str,
    pub(super) ours: &'static str,
}

/// A pair with its figures, scaled.
#[derive(Clone, Debug)]
pub(super) struct Compared {
    pub(super) label: &'static str,
    pub(super) theirs: Vec<f64>,
    pub(super) ours: Vec<f64>,
    /// Ours divided by theirs, round by round.
    pub(super) ratio: Spread,
    /// Why one of the two does not count, if so.
    pub(super) void: Option<String>,
}

impl Compared {
    /// Returns the figures of a pair; none if one of its cells was not run.
    pub(super) fn of(results: &Results, pair: &Pair, metric: &Metric) -> Option<Self> {
        let (theirs, ours) = (results.row(pair.theirs)?, results.row(pair.ours)?);
        let scaled = |values: Vec<f64>| values.into_iter().map(|value| value / metric.scale).collect::<Vec<f64>>();
        let (their_values, our_values) = (scaled(theirs.values(metric.column)?), scaled(ours.values(metric.column)?));
        let ratios: Vec<f64> = our_values.iter().zip(&their_values).map(|(ours, theirs)| ours / theirs).collect();
        let void = [(theirs, "QEMU's"), (ours, "Sterna's")]
            .into_iter()
            .find_map(|(row, whose)| row.void.as_ref().map(|why| format!("{whose}: {why}")));
        Some(Self { label: pair.label, ratio: Spread::of(&ratios)?, theirs: their_values, ours: our_values, void })
    }
}

/// Returns which pairs are below 1 in every round, above 1 in every round, or neither. `less` and `more` are sentences without their
/// cases; one that has none is left out.
pub(super) fn verdict(compared: &[Compared], less: &str, more: &str) -> String {
    let cases = |wanted: fn(&Spread) -> bool| {
        let labels: Vec<_> = compared.iter().filter(|pair| wanted(&pair.ratio)).map(|pair| pair.label).collect();
        (!labels.is_empty()).then(|| labels.join(", "))
    };
    let parts = [
        (less, cases(|ratio| ratio.max < 1.0)),
        (more, cases(|ratio| ratio.min > 1.0)),
        ("The runs show no clear difference", cases(|ratio| ratio.min <= 1.0 && ratio.max >= 1.0)),
    ];
    let sentences = parts.into_iter().filter_map(|(words, cases)| cases.map(|cases| format!("{words}: {cases}.")));
    sentences.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(label: &'static str, ratios: &[f64]) -> Compared {
        Compared { label, theirs: vec![1.0], ours: vec![1.0], ratio: Spread::of(ratios).unwrap(), void: None }
    }

    #[test]
    fn only_what_holds_in_every_round_is_called_less_or_more() {
        let pairs = [pair("a", &[0.5, 0.9]), pair("b", &[0.9, 1.1]), pair("c", &[1.2, 3.0]), pair("d", &[0.1])];
        assert_eq!(verdict(&pairs, "Less", "More"), "Less: a, d. More: c. The runs show no clear difference: b.");
        assert_eq!(verdict(&pairs[2..3], "Less", "More"), "More: c.");
    }
}
