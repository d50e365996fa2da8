//! Raw BSON documents, built and copied without decoding, for speed: every ended job passes here.

use bson::{
    RawBsonRef, RawDocument, RawDocumentBuf,
    raw::{CStr, cstr},
};

/// Maximum size of one document in bytes of BSON, minus room for fields that MongoDB adds.
pub(crate) const LARGEST_DOCUMENT: usize = 16 * 1024 * 1024 - 64 * 1024;
/// A document without fields, as BSON: its length and its terminator.
const EMPTY: [u8; 5] = [5, 0, 0, 0, 0];

/// An empty document that can grow by this many bytes without another allocation.
pub(crate) fn roomy(bytes: usize) -> RawDocumentBuf {
    let mut buffer = Vec::with_capacity(bytes);
    buffer.extend(EMPTY);
    RawDocumentBuf::from_bytes(buffer).expect("an empty document is valid BSON")
}

/// A copy of a document without `scheduled_at`, with these fields replaced or added, and a default for each of these fields that is missing
/// or null.
pub(crate) fn completed(
    document: &RawDocument,
    by: &[(&CStr, RawBsonRef<'_>)],
    defaults: &[(&CStr, RawBsonRef<'_>)],
) -> bson::error::Result<RawDocumentBuf> {
    let mut copy = roomy(document.as_bytes().len() + 512);
    let mut new: Vec<bool> = vec![true; by.len()];
    let mut missing: Vec<bool> = defaults.iter().map(|(field, _)| by.iter().all(|(given, _)| given != field)).collect();
    for element in document.iter_elements() {
        let element = element?;
        let key = element.key();
        if let Some(at) = by.iter().position(|(field, _)| *field == key) {
            new[at] = false;
            copy.append(key, by[at].1);
        } else if key != cstr!("scheduled_at") {
            let value = element.value();
            if let Some(at) = defaults.iter().position(|(field, _)| *field == key) {
                if matches!(value, Ok(RawBsonRef::Null)) {
                    continue;
                }
                missing[at] = false;
            }
            match value {
                Ok(value) => copy.append(key, value),
                Err(_) => copy.append(key, element.value_utf8_lossy()?),
            }
        }
    }
    by.iter().zip(new).filter(|(_, new)| *new).for_each(|((field, value), _)| copy.append(field, *value));
    defaults.iter().zip(missing).filter(|(_, missing)| *missing).for_each(|((field, value), _)| copy.append(field, *value));
    Ok(copy)
}
