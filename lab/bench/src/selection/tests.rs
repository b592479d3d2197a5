use super::*;

fn row(name: &str, figures: [f64; COLUMNS.len()]) -> Row {
    Row { name: name.into(), detail: String::new(), runs: vec![figures.into()], void: None }
}

fn findings(rows: Vec<Row>) -> Findings {
    Findings { name: "selection", columns: COLUMNS, rows, targets: Vec::new(), notes: Vec::new() }
}

/// To the best fixed choice, and to none.
fn cell(name: &str, to_best: f64, to_none: f64) -> Row {
    row(name, [to_none, to_none / to_best, 1.0, 1.0, to_best, 1.0, 0.6, 0.0, 0.0])
}

#[test]
fn the_mean_is_geometric_and_the_worst_cell_is_named() {
    let mut findings = findings(vec![
        cell("virtual: text, 1 Gbit/s × 2", 0.5, 0.3),
        cell("virtual: ones, 1 Gbit/s × 2", 2.0, 0.3),
        cell("virtual: mixed, 1 Gbit/s × 2", 0.9, 0.3),
        cell("virtual: mixed, unlimited × 2", 1.0, 1.04),
        cell("virtual: mixed, 1 Gbit/s × 2, 0.5 CPUs allowed", 0.9, 0.3),
        cell("real: text, 1 Gbit/s", 1.2, 0.3),
    ]);
    judge(&mut findings);
    let target = |part: &str| {
        let found = findings.targets.iter().find(|target| target.name.contains(part));
        found.unwrap_or_else(|| panic!("no target {part}: {:?}", findings.targets))
    };
    let value = |part: &str| target(part).value.unwrap().median;
    assert!((value("virtual, auto to the best fixed choice, geometric") - 0.81f64.powf(0.2)).abs() < 1e-9);
    assert!(target("virtual, auto to the best fixed choice, worst").name.ends_with("(virtual: ones, 1 Gbit/s × 2)"));
    assert_eq!(value("virtual, auto to the best fixed choice, worst"), 2.0);
    assert!((value("virtual, auto to the best fixed choice, mixed") - 0.9).abs() < 1e-9);
    assert_eq!(value("virtual, auto to none"), 1.04);
    assert!((value("CPU used by auto") - 1.2).abs() < 1e-9 && target("CPU used by auto").met() == Some(false));
    assert_eq!(value("real, auto to the best fixed choice, worst"), 1.2);
    // A target that was not measured is not met.
    assert_eq!(target("real, auto to none").value, None);
}

#[test]
fn every_target_is_about_cells_that_are_measured_also_with_quick() {
    let names = plan::named().into_iter().map(|plan| plan.name());
    let real = real::named().into_iter().filter(Real::is_quick).map(|real| real.name());
    let mut findings = findings(names.chain(real).map(|name| cell(&name, 1.0, 1.0)).collect());
    judge(&mut findings);
    assert_eq!(findings.targets.len(), 9);
    assert!(findings.targets.iter().all(|target| target.value.is_some()), "{:?}", findings.targets);
}

#[test]
fn the_best_fixed_choice_is_the_fastest_that_keeps_to_the_cpu_or_none() {
    let took = |time: f64, cpus: f64| Took { time, cpu: cpus * time, ..Took::default() };
    let encoding = |time, cpus, fits| ("zstd".to_owned(), took(time, cpus), fits);
    let some = [encoding(9.0, 0.2, true), encoding(5.0, 0.5, true), encoding(3.0, 1.0, false)];
    assert_eq!(best_of(&some), 1);
    let none = [encoding(5.0, 0.7, false), encoding(9.0, 0.6, false), encoding(3.0, 1.0, false)];
    assert_eq!(best_of(&none), 0);
}
