//! A build that leaves something out says which feature adds it. `cargo test -p sterna` has none of these features; tests of the whole
//! workspace have them all.

#[cfg(not(feature = "tls"))]
#[test]
fn tls_is_refused_with_the_feature_that_adds_it() {
    let directory = std::path::Path::new("/nowhere");
    for refused in
        [sterna::TlsSettings::client(directory), sterna::TlsSettings::server(directory, &["source.example".to_owned()])]
    {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, sterna::TlsError::LeftOut) && refused.to_string().contains("`tls`"), "{refused}");
    }
}

#[cfg(not(any(feature = "zstd", feature = "qatzip")))]
#[test]
fn methods_and_engines_are_refused_with_the_feature_that_adds_them() {
    use sterna::{ChoiceError, MethodChoice};
    let parse = |text: &str| text.parse::<MethodChoice>();
    for (choice, feature) in [("zstd", "zstd"), ("zstd 3", "zstd"), ("deflate by qat", "qatzip")] {
        let refused = parse(choice).unwrap_err();
        assert!(matches!(refused, ChoiceError::LeftOut { .. }), "{refused:?}");
        assert!(refused.to_string().contains(&format!("the feature `{feature}`")), "{refused}");
    }
    assert!(matches!(parse("lzma"), Err(ChoiceError::UnknownMethod { .. })));
    assert!(matches!(parse("lz4 by qat"), Err(ChoiceError::NoEngine { .. })));
    for choice in ["auto", "none", "lz4", "deflate", "deflate 6", "deflate by cpu", "deflate by iaa"] {
        parse(choice).unwrap();
    }
}

#[cfg(all(feature = "accel", not(feature = "model")))]
#[test]
fn the_model_is_refused_with_the_feature_that_adds_it() {
    use sterna::{Accelerators, Offload, OffloadSettings};
    let refused = Offload::start(&Accelerators::model("/nowhere.json"), &OffloadSettings::default()).unwrap_err();
    assert!(refused.to_string().contains("feature `model`"), "{refused}");
}
