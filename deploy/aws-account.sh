#!/bin/bash
# What `ray up cluster.yaml` needs, once for each AWS account: a bucket, a role for the head, a role for workers, and the role
# that spot needs. The head may start workers; a worker may use the bucket and nothing else.
#
#     BUCKET=my-heads REGION=us-west-2 bash deploy/aws-account.sh
#
# docs/guide/cluster.md has the commands after it.
: "${BUCKET:?names the bucket}" "${REGION:?names the region}"

aws s3api create-bucket --bucket $BUCKET --region $REGION --create-bucket-configuration LocationConstraint=$REGION
# Uploads that were begun and never finished cost as much as files, and no listing shows them.
aws s3api put-bucket-lifecycle-configuration --bucket $BUCKET --lifecycle-configuration '{"Rules": [{"ID": "unfinished uploads",
  "Status": "Enabled", "Filter": {"Prefix": ""}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}]}'

ACCOUNT=$(aws sts get-caller-identity --query Account --output text)
TRUST='{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"},
  "Action": "sts:AssumeRole"}]}'
STORE='{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "arn:aws:s3:::'$BUCKET'"},
  {"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
   "Resource": "arn:aws:s3:::'$BUCKET'/*"}]}'
LAUNCH='{"Version": "2012-10-17", "Statement": [
  {"Effect": "Allow", "Resource": "*", "Action": ["ec2:RunInstances", "ec2:TerminateInstances", "ec2:CreateTags",
   "ec2:DescribeInstances", "ssm:GetParameters"]},
  {"Effect": "Allow", "Action": "iam:PassRole", "Resource": "arn:aws:iam::'$ACCOUNT':role/headcount-worker"}]}'
for ROLE in headcount-head headcount-worker; do
  aws iam create-role --role-name $ROLE --assume-role-policy-document "$TRUST"
  aws iam put-role-policy --role-name $ROLE --policy-name store --policy-document "$STORE"
  aws iam create-instance-profile --instance-profile-name $ROLE
  aws iam add-role-to-instance-profile --instance-profile-name $ROLE --role-name $ROLE
done
aws iam put-role-policy --role-name headcount-head --policy-name launch --policy-document "$LAUNCH"
aws iam create-service-linked-role --aws-service-name spot.amazonaws.com      # an error where the account has it already
