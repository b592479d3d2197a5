//! Plots as SVG: every run is a dot, the median a line.
//!
//! Colours are readable on white and on black, also where the reader's colour scheme is not known to the viewer.

use std::fmt::Write as _;

use super::compared::Compared;
use crate::harness::Spread;

const WIDTH: f64 = 760.0;
const LEFT: f64 = 190.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 34.0;
/// Height of a pair: two strips and room between pairs.
const PAIR: f64 = 46.0;
const STRIP: f64 = 16.0;
const BOTTOM: f64 = 40.0;

/// Returns a plot of the pairs, one under the other. `axis` is the axis's title with its unit; `names` are those of theirs and ours.
pub(super) fn strips(title: &str, axis: &str, names: [&str; 2], pairs: &[Compared]) -> String {
    let height = TOP + PAIR * pairs.len() as f64 + BOTTOM;
    let most = pairs.iter().flat_map(|pair| pair.theirs.iter().chain(&pair.ours)).copied().fold(0.0, f64::max);
    let (step, end) = scale(most);
    let x = |value: f64| LEFT + value / end * (WIDTH - LEFT - RIGHT);
    let mut svg = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-family="sans-serif" font-size="13">
<title>{title}</title>
<style>
text {{ fill: #6e7781 }} .grid {{ stroke: #8c959f; stroke-opacity: .35 }}
.theirs {{ fill: #d9822b; stroke: #d9822b }} .ours {{ fill: #2f7ed8; stroke: #2f7ed8 }}
circle {{ fill-opacity: .6; stroke-width: 0 }} .median {{ stroke-width: 3 }}
@media (prefers-color-scheme: light) {{ text {{ fill: #24292f }} }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #e6edf3 }} .theirs {{ fill: #f0a35e; stroke: #f0a35e }} .ours {{ fill: #6cb0ff; stroke: #6cb0ff }} }}
</style>
"##
    );
    for (index, (class, name)) in [("theirs", names[0]), ("ours", names[1])].into_iter().enumerate() {
        let at = LEFT + 150.0 * index as f64;
        let _ = writeln!(
            svg,
            r#"<circle class="{class}" cx="{at}" cy="14" r="5"/><text x="{}" y="18">{name}</text>"#,
            at + 11.0
        );
    }
    let bottom = TOP + PAIR * pairs.len() as f64;
    let mut value = 0.0;
    while value <= end + step / 2.0 {
        let at = x(value);
        let _ = writeln!(
            svg,
            r#"<line class="grid" x1="{at:.1}" y1="{TOP}" x2="{at:.1}" y2="{bottom}"/><text x="{at:.1}" y="{}" text-anchor="middle">{}</text>"#,
            bottom + 16.0,
            tick(value, step)
        );
        value += step;
    }
    let _ = writeln!(
        svg,
        r#"<text x="{:.1}" y="{}" text-anchor="middle">{axis}</text>"#,
        (LEFT + WIDTH - RIGHT) / 2.0,
        bottom + 34.0
    );
    for (index, pair) in pairs.iter().enumerate() {
        let top = TOP + PAIR * index as f64;
        let _ = writeln!(
            svg,
            r#"<text x="{}" y="{}" text-anchor="end">{}</text>"#,
            LEFT - 12.0,
            top + PAIR / 2.0 + 4.0,
            pair.label
        );
        for (strip, (class, values)) in [("theirs", &pair.theirs), ("ours", &pair.ours)].into_iter().enumerate() {
            let y = top + 7.0 + STRIP * (strip as f64 + 0.5);
            for value in values {
                let _ = writeln!(svg, r#"<circle class="{class}" cx="{:.1}" cy="{y}" r="4"/>"#, x(*value));
            }
            if let Some(Spread { median, .. }) = Spread::of(values) {
                let at = x(median);
                let _ = writeln!(
                    svg,
                    r#"<line class="median {class}" x1="{at:.1}" y1="{}" x2="{at:.1}" y2="{}"/>"#,
                    y - 7.0,
                    y + 7.0
                );
            }
        }
    }
    svg.push_str("</svg>\n");
    svg
}

/// Returns the distance of the axis's marks and its end, for figures up to `most`: at most seven marks at round figures.
fn scale(most: f64) -> (f64, f64) {
    let most = if most > 0.0 { most } else { 1.0 };
    let power = 10f64.powf((most / 6.0).log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| most / step <= 6.0);
    let step = step.unwrap_or(10.0 * power);
    (step, (most / step).ceil() * step)
}

fn tick(value: f64, step: f64) -> String {
    let places = if step >= 1.0 { 0 } else { (-step.log10()).ceil() as usize };
    format!("{value:.places$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_ends_at_a_round_figure_beyond_the_largest_run() {
        assert_eq!(scale(6.765), (2.0, 8.0));
        assert_eq!(scale(246.0), (50.0, 250.0));
        assert_eq!(scale(6.0), (1.0, 6.0));
        let (step, end) = scale(0.59);
        assert!((step - 0.1).abs() < 1e-12 && (end - 0.6).abs() < 1e-12);
        assert_eq!(tick(0.6, 0.1), "0.6");
    }

    #[test]
    fn each_run_is_a_dot_and_each_side_of_a_pair_has_a_median() {
        let ratio = Spread { median: 1.0, min: 1.0, max: 1.0 };
        let pair = Compared { label: "a", theirs: vec![1.0, 2.0, 4.0], ours: vec![3.0], ratio, void: None };
        let svg = strips("title", "seconds", ["QEMU", "Sterna"], &[pair.clone(), pair]);
        // Beside the dots of the runs the legend has two.
        assert_eq!(svg.matches("<circle").count(), 2 + 2 * 4);
        assert_eq!(svg.matches(r#"class="median"#).count(), 4);
        assert!(
            svg.contains(r#"class="median theirs" x1="463.0""#),
            "the median of 1, 2 and 4, on an axis to 4: {svg}"
        );
    }
}
