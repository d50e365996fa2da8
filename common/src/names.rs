//! Names of classes, groups, tags and keys.

/// Maximum length of a class, group, tag or urn, in bytes.
pub const LONGEST_NAME: usize = 256;

/// Checks a name that is stored and indexed.
///
/// # Errors
/// What is wrong with the name, as the end of a sentence.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    if name.is_empty() {
        Err("is empty".into())
    } else if name.len() > LONGEST_NAME {
        Err(format!("has {} bytes, and {LONGEST_NAME} is the limit", name.len()))
    } else if name.contains('\0') {
        Err(format!("contains a NUL character: {name:?}"))
    } else {
        Ok(())
    }
}
